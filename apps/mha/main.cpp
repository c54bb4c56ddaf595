#include <c10/util/Exception.h>
#include <draw/label.h>
#include <fcntl.h>
#include <fmt/core.h>
#include <mha/version.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "command.h"
#include "help_format.h"
#include "memory.h"

namespace mha::cli {
namespace {

/// A closed standard stream leaves its number to the next file that is opened, and what is
/// meant for the stream would be written there. These take no output, as the closed one did.
void hold_closed_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) == -1)
      open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

/// The message on one line, however many it came on.
std::string one_line(const std::string& message) {
  std::string line;
  for (const char c : message) {
    const bool blank = c == '\n' || c == '\r' || c == '\t' || c == ' ';
    if (!blank) {
      line += c;
    } else if (!line.empty() && line.back() != ' ') {
      line += ' ';
    }
  }
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

ExitCode report_error(const std::string& message) {
  // What arguments and files hold is in it. Without a place to go it is lost, and no error.
  const std::string line =
      "mha: error: " + draw::detail::printable(one_line(in_our_words(message))) + '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);
  return kError;
}

/// Parses the arguments and runs the command that they name.
ExitCode run_program(int argc, const char* const* argv) {
  CLI::App program("Multi-head attention for LibTorch.", "mha");
  program.set_version_flag("--version", "mha " + version(), "Print the version and exit");
  program.formatter(std::make_shared<HelpFormat>());  // the commands take it over
  program.require_subcommand(0, 1);                   // none: the message below names them
  program.footer(
      "Example: mha demo\n"
      "Exit codes: 0 success, 1 a difference above the tolerance, 2 an error.");
  const std::array commands = {demo_command(program),    run_command(program),
                               convert_command(program), compare_command(program),
                               map_command(program),     info_command(program),
                               bench_command(program)};
  for (const Command& command : commands) command.app->group("Commands");
  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForVersion& asked) {
    std::printf("%s\n", asked.what());
    return kSuccess;
  } catch (const CLI::CallForHelp& asked) {
    program.exit(asked);
    return kSuccess;
  } catch (const CLI::ParseError& error) {
    std::string help = "mha", problem = error.what();
    for (const Command& command : commands) {
      if (!command.app->parsed()) continue;
      help += " " + command.app->get_name();
      // What is missing may be there, misspelled. CLI11 lists from the last to the first.
      auto unknown = command.app->remaining();
      std::reverse(unknown.begin(), unknown.end());
      const bool is_missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr;
      const bool is_unknown = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
      if ((is_missing || is_unknown) && !unknown.empty()) {
        problem = CLI::ExtrasError(unknown).what();
      }
    }
    return report_error(fmt::format("{} (see {} --help)", problem, help));
  }
  for (const Command& command : commands) {
    if (command.app->parsed()) return command.run();
  }
  return report_error(
      "expected a command, demo, run, convert, compare, map, info or bench (see mha --help)");
}

}  // namespace
}  // namespace mha::cli

int main(int argc, char** argv) {
  using namespace mha::cli;
  hold_closed_streams();
  ExitCode code = kError;
  try {
    code = run_program(argc, argv);
  } catch (const c10::Error& error) {
    return report_error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report_error(error.what());
  }
  // A full disk or a closed pipe shows only here.
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    return report_error(fmt::format("cannot write to standard output: {}", strerror(errno)));
  }
  return code;
}
