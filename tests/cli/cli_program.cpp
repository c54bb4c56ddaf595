#include "cli/cli_program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <spawn.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "support/file_support.h"

namespace mha::test {
namespace {

/// argv or envp of a program: pointers into strings that outlive it.
std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (std::string& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> environment_with(const Environment& changes) {
  std::vector<std::string> result;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string text = *variable;
    if (changes.count(text.substr(0, text.find('='))) == 0) result.push_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) result.push_back(name + "=" + value);
  }
  return result;
}

/// The files that take the place of the program's standard streams.
class Streams {
 public:
  Streams() { posix_spawn_file_actions_init(&actions_); }
  ~Streams() { posix_spawn_file_actions_destroy(&actions_); }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  void to_file(int descriptor, const std::string& path) {
    posix_spawn_file_actions_addopen(&actions_, descriptor, path.c_str(), O_WRONLY | O_CREAT,
                                     0600);
  }
  void to_descriptor(int descriptor, int target) {
    posix_spawn_file_actions_adddup2(&actions_, target, descriptor);
  }

  void close(int descriptor) { posix_spawn_file_actions_addclose(&actions_, descriptor); }

  pid_t start(const std::vector<std::string>& arguments, const Environment& changes) {
    std::vector<std::string> words = {MHA_CLI};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<std::string> variables = environment_with(changes);
    pid_t process = 0;
    const int problem = posix_spawn(&process, MHA_CLI, &actions_, nullptr,
                                    pointers(words).data(), pointers(variables).data());
    if (problem != 0) throw std::system_error(problem, std::generic_category(), MHA_CLI);
    return process;
  }

 private:
  posix_spawn_file_actions_t actions_;
};

int exit_code_of(pid_t process) {
  int status = 0;
  waitpid(process, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

ProgramResult run_mha(const std::vector<std::string>& arguments,
                      const Environment& environment) {
  const TemporaryDirectory directory;
  ProgramResult result = run_mha_into(directory.file("output"), arguments, environment);
  result.output = read_bytes(directory.file("output"));
  return result;
}

ProgramResult run_mha_into(const std::string& path, const std::vector<std::string>& arguments,
                           const Environment& environment) {
  const TemporaryDirectory directory;
  Streams streams;
  streams.to_file(STDOUT_FILENO, path);
  streams.to_file(STDERR_FILENO, directory.file("error"));
  const int exit_code = exit_code_of(streams.start(arguments, environment));
  return {exit_code, "", read_bytes(directory.file("error"))};
}

ProgramResult run_mha_without(const std::vector<int>& closed,
                              const std::vector<std::string>& arguments) {
  const TemporaryDirectory directory;
  Streams streams;
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    streams.to_file(descriptor, directory.file(std::to_string(descriptor)));
  }
  for (const int descriptor : closed) streams.close(descriptor);
  return {exit_code_of(streams.start(arguments, {})), "", ""};
}

ProgramResult run_mha_at_terminal(const std::vector<std::string>& arguments, int columns,
                                  const Environment& environment) {
  winsize size{};
  size.ws_col = static_cast<unsigned short>(columns);
  size.ws_row = 50;
  int ours = -1, theirs = -1;
  if (openpty(&ours, &theirs, nullptr, nullptr, &size) != 0) {
    throw std::system_error(errno, std::generic_category(), "openpty");
  }
  Streams streams;
  streams.to_descriptor(STDOUT_FILENO, theirs);
  streams.to_descriptor(STDERR_FILENO, theirs);
  const pid_t process = streams.start(arguments, environment);
  ::close(theirs);

  ProgramResult result;
  char buffer[4096];
  // At the end of the last writer Linux reports an error, not an end of file.
  for (ssize_t count; (count = read(ours, buffer, sizeof(buffer))) > 0;) {
    result.output.append(buffer, static_cast<size_t>(count));
  }
  ::close(ours);
  result.exit_code = exit_code_of(process);
  // The terminal makes each line end "\r\n".
  result.output.erase(std::remove(result.output.begin(), result.output.end(), '\r'),
                      result.output.end());
  return result;
}

void expect_error(const ProgramResult& result, const std::string& text) {
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.output, "");
  EXPECT_EQ(result.error.rfind("mha: error: ", 0), 0u) << result.error;
  EXPECT_NE(result.error.find(text), std::string::npos)
      << "expected: " << text << "\nfound: " << result.error;
  EXPECT_EQ(result.error.find('\n'), result.error.size() - 1) << result.error;
}

}  // namespace mha::test
