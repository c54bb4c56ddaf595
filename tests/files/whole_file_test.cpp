// Guards how files are written, by whichever function: whole or not at all, through links, with
// the mode that they had, and nothing left beside them, whatever ends the writing. Bytes and
// modes are exact.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <mha/kv_cache.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "files/safetensors.h"
#include "support/file_support.h"
#include "support/support.h"
#include "support/torch_headers.h"

namespace mha::detail {
namespace {

namespace fs = std::filesystem;

using test::error_of;
using test::read_bytes;
using test::write_bytes;

TensorFile contents(float value, int64_t numbers = 100) {
  return {{{"x", at::full({numbers}, value)}}, {}};
}

bool holds(const std::string& path, float value) {
  return read_safetensors(path).tensors.at("x").eq(value).all().item<bool>();
}

int mode_of(const std::string& path) {
  struct stat status {};
  stat(path.c_str(), &status);
  return static_cast<int>(status.st_mode & 07777);
}

/// No file may be longer within the scope. Writing on is an error, or kills where `kills`.
class LargestFile {
 public:
  LargestFile(rlim_t bytes, bool kills) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
    handler_ = std::signal(SIGXFSZ, kills ? SIG_DFL : SIG_IGN);
    const rlimit none = {0, 0};
    if (kills) setrlimit(RLIMIT_CORE, &none);
  }
  ~LargestFile() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  LargestFile(const LargestFile&) = delete;
  LargestFile& operator=(const LargestFile&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = SIG_DFL;
};

class WholeFileTest : public ::testing::Test {
 protected:
  std::string in(const std::string& name) const { return directory_.file(name); }

  const test::TemporaryDirectory directory_;
  const std::string path_ = directory_.file("a.safetensors");
};

// --- what lies there ---

TEST_F(WholeFileTest, AFileThatIsWrittenOverKeepsItsMode) {
  for (const int mode : {0600, 0640, 0660, 0755}) {
    write_bytes(path_, "old");
    fs::permissions(path_, static_cast<fs::perms>(mode));
    write_safetensors(path_, contents(1));
    EXPECT_EQ(mode_of(path_), mode);
    EXPECT_TRUE(holds(path_, 1));
  }
}

TEST_F(WholeFileTest, ANewFilesModeIsThatOfAnyNewFile) {
  for (const mode_t mask : {0022u, 0077u}) {
    const mode_t before = umask(mask);
    write_safetensors(path_, contents(1));
    umask(before);
    EXPECT_EQ(mode_of(path_), static_cast<int>(0666 & ~mask));
    fs::remove(path_);
  }
}

TEST_F(WholeFileTest, ACachesFileKeepsItsModeToo) {
  KVCache cache;
  cache.append(at::ones({1, 1, 2, 4}), at::ones({1, 1, 2, 4}));
  write_bytes(path_, "old");
  fs::permissions(path_, fs::perms::owner_read | fs::perms::owner_write);
  cache.save(path_);
  EXPECT_EQ(mode_of(path_), 0600);
}

TEST_F(WholeFileTest, ALinkIsWrittenThroughWhetherItsTargetIsThereOrNot) {
  fs::create_directory(in("folder"));
  const std::string target = in("folder/target");
  fs::create_symlink("folder/target", in("relative"));
  fs::create_symlink(target, in("absolute"));
  fs::create_symlink("relative", in("chain"));
  for (const char* link : {"relative", "absolute", "chain"}) {
    for (const float value : {1.0F, 2.0F}) {  // a dangling link, then one to a file
      write_safetensors(in(link), contents(value));
      EXPECT_TRUE(fs::is_symlink(in(link))) << link;
      EXPECT_FALSE(fs::is_symlink(target)) << link;
      EXPECT_TRUE(holds(target, value)) << link;
    }
    fs::remove(target);
  }
}

TEST_F(WholeFileTest, ALinkThatLeadsNowhereIsAnErrorAndStays) {
  fs::create_symlink("loop", in("loop"));
  fs::create_symlink("no-folder/file", in("lost"));
  for (const char* link : {"loop", "lost"}) {
    const std::string error = error_of([&] { write_safetensors(in(link), contents(1)); });
    EXPECT_NE(error.find(std::string(link) + ": cannot be written: "), std::string::npos)
        << error;
    EXPECT_TRUE(fs::is_symlink(in(link)));
  }
  EXPECT_EQ(directory_.count(), 2);
}

TEST_F(WholeFileTest, OnlyARegularFileIsWrittenOver) {
  fs::create_directory(in("folder"));
  ASSERT_EQ(mkfifo(in("pipe").c_str(), 0600), 0);
  const auto refused = [](const std::string& path, const std::string& found) {
    const std::string error = error_of([&] { write_safetensors(path, contents(1)); });
    EXPECT_EQ(error.rfind(path + ": expected a regular file, found " + found, 0), 0u) << error;
  };
  refused(in("folder"), "a directory");
  refused(in("pipe"), "a device, pipe or socket");
  refused("/dev/null", "a device, pipe or socket");
  EXPECT_EQ(directory_.count(), 2);
}

// --- names ---

TEST_F(WholeFileTest, ANameWithAZeroByteIsRefusedAndNoOtherFileIsTouched) {
  const std::string name = path_ + std::string("\0b", 2);
  const std::string expected = "path: expected the name of a file, found '" + path_ + "\\x00b'";
  EXPECT_EQ(error_of([&] { write_safetensors(name, contents(1)); }), expected);
  EXPECT_EQ(directory_.count(), 0);
  write_safetensors(path_, contents(1));
  EXPECT_EQ(error_of([&] { read_safetensors(name); }), expected);
}

TEST_F(WholeFileTest, AnEmptyNameIsRefused) {
  EXPECT_EQ(error_of([] { write_safetensors("", contents(1)); }),
            "path: expected the name of a file, found ''");
}

TEST_F(WholeFileTest, ANameMayBeAsLongAsTheSystemAllows) {
  const std::string longest = in(std::string(255, 'n'));
  for (const float value : {1.0F, 2.0F}) {
    write_safetensors(longest, contents(value));
    EXPECT_TRUE(holds(longest, value));
  }
  const std::string error = error_of([&] { write_safetensors(longest + "n", contents(1)); });
  EXPECT_NE(error.find(": cannot be written: File name too long"), std::string::npos) << error;
  EXPECT_EQ(directory_.count(), 1);
}

// --- what ends the writing ---

TEST_F(WholeFileTest, AWriteThatFailsLeavesWhatWasThereAndNothingElse) {
  const TensorFile large = contents(2, 1 << 16);
  const auto error = [&] {
    const LargestFile limit(4096, /*kills=*/false);
    return error_of([&] { write_safetensors(path_, large); });
  };
  EXPECT_NE(error().find(": cannot be written: File too large"), std::string::npos);
  EXPECT_EQ(directory_.count(), 0);
  write_safetensors(path_, contents(1));
  EXPECT_NE(error().find(": cannot be written: File too large"), std::string::npos);
  EXPECT_EQ(directory_.count(), 1);
  EXPECT_TRUE(holds(path_, 1));
}

TEST_F(WholeFileTest, AProcessThatIsKilledWhileItWritesLeavesWhatWasThereAndNothingElse) {
  const int nameless = open(in("").c_str(), O_TMPFILE | O_WRONLY, 0600);
  if (nameless < 0) GTEST_SKIP() << "this file system has no files without a name";
  close(nameless);
  const TensorFile large = contents(2, 1 << 16);  // made before the fork, by all threads
  const auto killed = [&] {
    const LargestFile limit(4096, /*kills=*/true);
    write_safetensors(path_, large);
  };
  EXPECT_EXIT(killed(), ::testing::KilledBySignal(SIGXFSZ), "");
  EXPECT_EQ(directory_.count(), 0);
  write_safetensors(path_, contents(1));
  EXPECT_EXIT(killed(), ::testing::KilledBySignal(SIGXFSZ), "");
  EXPECT_EQ(directory_.count(), 1);
  EXPECT_TRUE(holds(path_, 1));
}

TEST_F(WholeFileTest, ThreadsThatWriteOneFileLeaveOneOfTheirs) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(8);
  for (size_t i = 0; i < errors.size(); ++i) {
    threads.emplace_back([&, i] {
      errors[i] = error_of([&] {
        for (int repeat = 0; repeat < 20; ++repeat) {
          write_safetensors(path_, contents(static_cast<float>(i)));
          read_safetensors(path_);  // whole at any time
        }
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "no error");
  const float first = read_safetensors(path_).tensors.at("x")[0].item<float>();
  EXPECT_TRUE(holds(path_, first));
  EXPECT_EQ(directory_.count(), 1);
}

}  // namespace
}  // namespace mha::detail
