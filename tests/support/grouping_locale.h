#pragma once

#include <locale>
#include <string>

namespace mha::test {

/// While it lives, the program's locale writes numbers as "1.234.567,5".
class GroupingLocale {
 public:
  GroupingLocale() : before_(std::locale::global({std::locale::classic(), new Numbers})) {}
  ~GroupingLocale() { std::locale::global(before_); }
  GroupingLocale(const GroupingLocale&) = delete;
  GroupingLocale& operator=(const GroupingLocale&) = delete;

 private:
  class Numbers : public std::numpunct<char> {
   protected:
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };

  const std::locale before_;
};

}  // namespace mha::test
