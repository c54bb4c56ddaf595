#include "files/sharded_file.h"

#include <c10/util/Exception.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "files/excerpt.h"
#include "files/input_file.h"
#include "files/json_text.h"

namespace mha::detail {
namespace {

constexpr size_t kMaxShards = 4096;
// Of an index, which names the tensors of many files: its text, and what is kept of it.
constexpr int64_t kMaxIndexSize = 32 << 20;
constexpr size_t kMaxIndexKept = 64 << 20;

// Takes the `weight_map` out of the events of nlohmann's parser and passes over the rest, so
// that neither depth nor size of a hostile text costs anything.
class IndexHandler {
 public:
  explicit IndexHandler(const std::string& path) : path_(path) {}

  std::map<std::string, std::string> take() {
    TORCH_CHECK(has_map_, path_, ": expected an index with a weight_map, found none");
    return std::move(shard_of_);
  }

  bool start_object(size_t /*size*/) {
    if (depth_ == 1 && top_key_ == kWeightMap) {
      if (has_map_) fail("expected one, found several");
      has_map_ = in_map_ = true;
    } else if (in_map_) {
      not_a_name("an object");
    }
    ++depth_;
    return true;
  }
  bool end_object() {
    if (--depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(size_t /*size*/) {
    check("an array");
    ++depth_;
    return true;
  }
  bool end_array() {
    --depth_;
    return true;
  }
  bool key(std::string& text) {
    if (depth_ == 1) top_key_ = std::move(text);
    if (in_map_ && depth_ == 2) name_ = std::move(text);
    return true;
  }
  bool string(std::string& text) {
    if (!in_map_) return check("a string");
    kept_size_ += name_.size() + text.size() + 128 + sizeof(TensorEntries::value_type);
    TORCH_CHECK(kept_size_ <= kMaxIndexKept, path_, ": weight_map: expected names of at most ",
                kMaxIndexKept, " bytes in all, found more");
    if (!shard_of_.emplace(name_, std::move(text)).second) {
      fail("tensor " + excerpt(name_) + ": expected one of that name, found several");
    }
    return true;
  }
  bool number_integer(int64_t /*value*/) { return check("a number"); }
  bool number_unsigned(uint64_t /*value*/) { return check("a number"); }
  bool number_float(double /*value*/, const std::string& /*text*/) { return check("a number"); }
  bool boolean(bool /*value*/) { return check("a bool"); }
  bool null() { return check("null"); }
  bool binary(nlohmann::json::binary_t& /*value*/) { return check("binary data"); }

  bool parse_error(size_t position, const std::string& /*last_token*/,
                   const nlohmann::json::exception& /*error*/) {
    TORCH_CHECK(false, path_, ": expected valid JSON, found none at byte ", position);
  }

 private:
  static constexpr std::string_view kWeightMap = "weight_map";

  [[noreturn]] void fail(const std::string& problem) const {
    TORCH_CHECK(false, path_, ": weight_map: ", problem);
  }
  [[noreturn]] void not_a_name(const char* found) const {
    fail("tensor " + excerpt(name_) + ": expected the name of a file, found " + found);
  }
  bool check(const char* found) const {
    if (in_map_) not_a_name(found);
    if (depth_ == 1 && top_key_ == kWeightMap) {
      fail(std::string("expected an object, found ") + found);
    }
    return true;
  }

  const std::string& path_;
  std::map<std::string, std::string> shard_of_;
  std::string top_key_, name_;
  size_t depth_ = 0, kept_size_ = 0;
  bool has_map_ = false, in_map_ = false;
};

// Only a file beside the index: an index from elsewhere must not reach any other.
void check_shard_name(const std::string& path, const std::string& shard) {
  const bool plain = !shard.empty() && shard != "." && shard != ".." &&
                     shard.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
  TORCH_CHECK(plain && shard.size() <= 255, path,
              ": weight_map: expected the name of a file beside the index, found ",
              excerpt(shard));
}

}  // namespace

ShardedFile::ShardedFile(std::string path, Checksums checksums)
    : path_(std::move(path)), checksums_(checksums) {
  {
    InputFile file(path_);
    TORCH_CHECK(file.size() <= kMaxIndexSize, path_, ": expected an index of at most ",
                kMaxIndexSize, " bytes, found ", file.size());
    const std::string whole = file.read(0, file.size(), "index");
    const std::string_view text = without_leading_space(whole);
    check_json_text(path_, text);
    IndexHandler handler(path_);
    nlohmann::json::sax_parse(text.begin(), text.end(), &handler);
    shard_of_ = handler.take();
  }
  for (const auto& [name, shard] : shard_of_) undescribed_[shard].push_back(&name);
  TORCH_CHECK(undescribed_.size() <= kMaxShards, path_, ": weight_map: expected at most ",
              kMaxShards, " files, found ", undescribed_.size());
  for (const auto& [shard, names] : undescribed_) check_shard_name(path_, shard);
}

std::vector<std::string> ShardedFile::files() const {
  std::set<std::string> shards;
  for (const auto& [name, shard] : shard_of_) shards.insert(shard);
  std::vector<std::string> files = {path_};
  for (const std::string& shard : shards) files.push_back(path_of(shard));
  return files;
}

const TensorEntries& ShardedFile::entries() const {
  for (const auto& [name, shard] : shard_of_) find(name);
  return entries_;
}

void ShardedFile::visit_names(const std::string& start,
                              const std::function<bool(const std::string& name)>& visit) const {
  for (auto at = shard_of_.lower_bound(start); at != shard_of_.end() && visit(at->first);) ++at;
}

const TensorEntry* ShardedFile::find(const std::string& name) const {
  const auto place = shard_of_.find(name);
  if (place == shard_of_.end()) return nullptr;
  describe(place->second, name);
  const auto found = entries_.find(name);
  TORCH_CHECK(found != entries_.end(), path_, ": tensor ", excerpt(name), ": expected it in ",
              excerpt(place->second), ", found it missing there");
  return &found->second;
}

std::string ShardedFile::path_of(const std::string& shard) const {
  return std::filesystem::path(path_).replace_filename(shard).string();
}

TensorSource& ShardedFile::open(const std::string& shard) const {
  if (open_shard_ != shard) {
    shard_.reset();
    open_shard_.clear();
    shard_ = open_tensors(path_of(shard), checksums_, Shards::refused);
    open_shard_ = shard;
  }
  return *shard_;
}

void ShardedFile::describe(const std::string& shard, const std::string& wanted) const {
  const auto names = undescribed_.find(shard);
  if (names == undescribed_.end()) return;
  std::error_code ignored;
  TORCH_CHECK(std::filesystem::exists(path_of(shard), ignored), path_, ": tensor ",
              excerpt(wanted), ": expected it in ", path_of(shard), ", found no such file");
  const TensorEntries& all = open(shard).entries();
  for (const std::string* name : names->second) {
    const auto found = all.find(*name);
    if (found != all.end()) entries_.insert(*found);
  }
  undescribed_.erase(names);
}

at::Tensor ShardedFile::read(const std::string& name) {
  readable(name);
  return open(shard_of_.at(name)).read(name);
}

}  // namespace mha::detail
