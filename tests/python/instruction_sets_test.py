"""Guards the summary at the end of `bash cmake/bootstrap.sh test`: each instruction set stands in it,
with how often it ran and what failed, or why it did not run. The results are of ctest's form."""

import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "cmake"))
import instruction_sets  # noqa: E402


def case(name, status, output):
    return (f'<testcase name="{name}" status="{status}"><properties/>'
            f"<system-out>{output}\n</system-out></testcase>")


def summary(cases):
    with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
        file.write(f"<testsuite>{''.join(cases)}</testsuite>")
        file.flush()
        return list(instruction_sets.summary(file.name))


class InstructionSetsTest(unittest.TestCase):
    def test_what_ran_and_what_this_cpu_cannot_are_named(self):
        self.assertEqual(
            summary([
                case("a", "run", "kernels: avx2"),
                case("a.on_generic", "run", "kernels: generic"),
                case("a.on_avx2", "notrun", "not run: avx2: the widest here"),
                case("a.on_avx512", "notrun", "not run: avx512: this CPU cannot"),
                case("a.on_amx-emulated", "run", "kernels: amx-emulated"),
                case("a.on_amx", "notrun", "not run: amx: this CPU cannot"),
                case("a.on_plain", "run", "kernels: plain"),
                case("unrelated", "fail", ""),
            ]),
            ["generic: 1 runs", "avx2: 1 runs",
             "avx512: NOT RUN: this CPU cannot",
             "avx512_bf16: NOT RUN: this CPU cannot, or not faster than float32",
             "amx-emulated: 1 runs", "amx: NOT RUN: this CPU cannot",
             "torch: NOT RUN: not under sanitizers", "plain: 1 runs"])

    def test_what_failed_or_ended_early_is_named(self):
        lines = summary([
            case("a", "run", "kernels: avx512 avx512_bf16"),
            case("a.on_generic", "fail", "kernels: generic\nnot equal"),
            case("a.on_avx2", "fail", ""),
        ])
        self.assertIn("generic: 1 runs, FAILED: a.on_generic", lines)
        self.assertIn("avx2: 1 runs, FAILED: a.on_avx2", lines)
        self.assertIn("avx512: 1 runs", lines)
        self.assertIn("avx512_bf16: 1 runs", lines)
        self.assertIn("plain: NOT RUN: not under sanitizers", lines)


if __name__ == "__main__":
    unittest.main()
