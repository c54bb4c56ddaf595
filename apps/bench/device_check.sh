#!/usr/bin/env bash
# Checks mha on a device in one command: builds what is needed, runs the tests of devices there, then
# the benchmark beside torch's own, and writes all results as one JSON file.
#
#   bash apps/bench/device_check.sh [--device cuda] [--output build/device_check.json]
#                                   [--build build/device] [--case TEXT]...
#
# Takes the LibTorch of Torch_DIR or of the python3 that imports torch, and Debian's libgtest-dev,
# libcli11-dev, libfmt-dev, nlohmann-json3-dev and libpng-dev, installed or unpacked under
# CMAKE_PREFIX_PATH. A build that is there is used again. On 16 cores building takes some four
# minutes, the tests less than one, the default cases some two; each is stopped at its limit, and
# what was found so far is written. The exit status is 0 if all of it passed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

device=cuda output=build/device_check.json build=build/device cases=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --device) device=$2 ;;
    --output) output=$2 ;;
    --build) build=$2 ;;
    --case) cases+=(--case "$2") ;;
    *) echo "device_check: unknown argument $1; its first lines say what it takes" >&2; exit 2 ;;
  esac
  shift 2
done
if [[ ${#cases[@]} -eq 0 ]]; then
  for case in core_forward core_forward_causal core_backward module_forward module_forward_causal \
    module_weights module_train; do
    cases+=(--case "$case 8x128x768x12" --case "$case 1x2048x1024x16")
  done
  cases+=(--case "module_forward 1x2048x1024x16 bfloat16" --case "module_train 1x2048x1024x16 bfloat16"
    --case "core_forward_causal 1x2048x1024x16 bfloat16" --case decode --case cross_decode)
fi

parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

# part <name> <seconds> <command>...: what it says goes to files of that name, how it ended to `ends`.
part() {
  local name=$1 limit=$2 start=$SECONDS status=0
  shift 2
  echo "device_check: $name" >&2
  timeout "$limit" "$@" >"$parts/$name.out" 2>"$parts/$name.err" </dev/null || status=$?
  echo "$name $status $((SECONDS - start))" >>"$parts/ends"
  [[ $status -eq 0 ]] || tail -n 20 "$parts/$name.out" "$parts/$name.err" >&2
  return $status
}

torch_dir() {
  if [[ -n ${Torch_DIR:-} ]]; then echo "$Torch_DIR"; else
    python3 -c 'import torch; print(torch.utils.cmake_prefix_path + "/Torch")'
  fi
}

is_built=true
if [[ ! -f $build/CMakeCache.txt ]]; then
  part configure 120 cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DMHA_BUILD_TESTS=ON "-DTorch_DIR=$(torch_dir)" || is_built=false
fi
if $is_built; then
  part build 400 cmake --build "$build" --parallel "${MHA_JOBS:-$(nproc)}" \
    --target device_test mha_cli || is_built=false
fi
if $is_built; then
  part tests 200 env "MHA_TEST_DEVICE=$device" "$build/tests/device_test" --gtest_brief=1 \
    "--gtest_output=json:$parts/tests.json"
  part bench 240 "$build/apps/mha" bench --json --device "$device" "${cases[@]}"
fi
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader >"$parts/gpu" || true
fi

mkdir -p "$(dirname "$output")"
python3 - "$parts" "$device" "$output" <<'PYTHON'
import json, pathlib, sys

parts, device, output = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])

def text(name):
    path = parts / name
    return path.read_text(errors="replace") if path.exists() else ""

def parsed(name):
    try:
        return json.loads(text(name))
    except json.JSONDecodeError:
        return None

def of_tests(report):
    """Counts, and the names and messages of what failed or was skipped."""
    if report is None:
        return None
    cases = [(f"{suite['name']}.{case['name']}", case)
             for suite in report["testsuites"] for case in suite["testsuite"]]
    skipped = [name for name, case in cases if case["result"] == "SKIPPED"]
    failed = {name: [failure["failure"][:2000] for failure in case["failures"]]
              for name, case in cases if "failures" in case}
    return {"run": len(cases) - len(skipped), "failed": failed, "skipped": skipped,
            "seconds": report["time"]}

steps = {}
for line in text("ends").splitlines():
    name, status, seconds = line.split()
    steps[name] = {"status": int(status), "seconds": int(seconds)}
    if status != "0":
        steps[name]["error"] = (text(f"{name}.out") + text(f"{name}.err"))[-4000:]
tests = of_tests(parsed("tests.json"))
passed = (all(name in steps and steps[name]["status"] == 0 for name in ("build", "tests", "bench"))
          and tests is not None and tests["run"] > 0)
report = {"device": device, "gpu": text("gpu").strip() or None, "passed": passed, "steps": steps,
          "tests": tests, "bench": parsed("bench.out")}
output.write_text(json.dumps(report, indent=2) + "\n")
print(f"device_check: {'passed' if passed else 'FAILED'} on {device}; all of it: {output}")
sys.exit(not passed)
PYTHON
