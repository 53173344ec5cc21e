#!/usr/bin/env bash
# jspec, transformers and llama.cpp on the same weights and prompts, by turns, on the CPU.
#
#   scripts/compare_cpu.sh [FLAGS of scripts/compare_llama_cpp.py]
#
# llama.cpp is built, the first time, from the sources inside the sdist of llama-cpp-python, in
# LLAMA_FOLDER (by default in jspec's cache; a few minutes on two cores). Where it cannot be
# built the rest is measured without it. transformers is measured if torch is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
sdist=llama-cpp-python==0.3.36
folder=${LLAMA_FOLDER:-${JSPEC_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/jspec}/llama.cpp}
programs="llama-completion llama-lookup llama-speculative-simple llama-quantize"

build() {
  command -v cmake >/dev/null || { echo "no cmake"; return 1; }
  mkdir -p "$folder"
  "$python" -m pip download -q --no-deps --no-binary llama-cpp-python -d "$folder" "$sdist" || return 1
  tar -xzf "$folder"/llama_cpp_python-*.tar.gz -C "$folder" || return 1
  cmake -S "$folder"/llama_cpp_python-*/vendor/llama.cpp -B "$folder/build" \
    -DCMAKE_BUILD_TYPE=Release -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF \
    -DLLAMA_BUILD_SERVER=OFF >"$folder/build.log" 2>&1 || return 1
  # shellcheck disable=SC2086  # a list of words
  cmake --build "$folder/build" -j "$(nproc)" --target $programs >>"$folder/build.log" 2>&1
}

if [ ! -x "$folder/build/bin/llama-quantize" ] && ! build; then
  echo "llama.cpp could not be built in $folder (see build.log there): measured without it" >&2
  exec "$python" -m scripts.compare_llama_cpp "$@"
fi
exec "$python" -m scripts.compare_llama_cpp --llama_cpp="$folder/build/bin" "$@"
