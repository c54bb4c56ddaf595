#!/usr/bin/env python3
"""Says which instruction sets of the kernels the tests ran on, and which they could not.

    python3 cmake/instruction_sets.py build/dev/tests.xml

The file is ctest's own (--output-junit). Counted are the programs that ctest runs once on the widest
set and once on each by name; tests/test_main.cpp says there on which set a run was, or why there was
none.
"""

import collections
import re
import sys
import xml.etree.ElementTree

SETS = ["generic", "avx2", "avx512", "avx512_bf16", "amx-emulated", "amx", "torch", "plain"]

# Why there may be no run at all.
ABSENT = {
    "avx512_bf16": "this CPU cannot, or not faster than float32",
    "torch": "not under sanitizers",
    "plain": "not under sanitizers",
}


def runs_of(path):
    """(sets, name of the test, its status, why it was skipped) of each run that counts."""
    cases = {case.get("name"): case for case in xml.etree.ElementTree.parse(path).iter("testcase")}
    for name, case in cases.items():
        program, _, named = name.partition(".on_")
        if program + ".on_generic" not in cases:
            continue
        output = case.findtext("system-out") or ""
        found = re.search(r"^kernels: (.+)$", output, re.MULTILINE)
        reason = re.search(r"^not run: [\w-]+: (.*)$", output, re.MULTILINE)
        yield (
            found.group(1).split() if found else [named or "unknown"],
            name,
            case.get("status"),
            reason.group(1) if reason else "",
        )


def summary(path):
    runs = collections.defaultdict(list)
    for instruction_sets, *run in runs_of(path):
        for instruction_set in instruction_sets:
            runs[instruction_set].append(run)
    for instruction_set in SETS + sorted(set(runs) - set(SETS)):
        found = runs.get(instruction_set, [])
        ran = [name for name, status, _ in found if status in ("run", "fail")]
        failed = [name for name, status, _ in found if status == "fail"]
        if ran:
            text = f"{len(ran)} runs"
            if failed:
                text += f", FAILED: {', '.join(failed)}"
        else:
            reasons = sorted({reason for _, _, reason in found if reason})
            text = "NOT RUN: " + ("; ".join(reasons) or ABSENT.get(instruction_set, "not in this build"))
        yield f"{instruction_set}: {text}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: instruction_sets.py JUNIT_FILE")
    try:
        print("\n".join(summary(sys.argv[1])))
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        sys.exit(f"no results of tests: {error}")
