#!/usr/bin/env bash
# One command for a machine with a GPU and no network, under 10 minutes: the laws, then the times.
#
#   scripts/gpu_session.sh RESULTS_FOLDER [TARGET]
#
# TARGET is a model with real text (a folder or a .gguf file); without it only random weights run.
# On a machine without a GPU everything runs at small shapes, to test the session itself.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: scripts/gpu_session.sh RESULTS_FOLDER [TARGET]}
target=${2:-}
mkdir -p "$out"

backend=$(python3 -c 'import jax; print(jax.default_backend())')
echo "backend: $backend"

echo "== laws"
python3 -m pytest -q tests/speculation tests/drafters tests/test_sampling.py \
  2>&1 | tail -n 15 | tee "$out/laws.txt"

echo "== parts of a round, random weights"
if [ "$backend" = cpu ]; then
  pairs=("random:smollm2-135m random:smollm2-135m:1")
else
  pairs=("random:llama3.2-3b random:llama3.2-1b" "random:llama3.1-8b random:llama3.2-1b")
fi
for pair in "${pairs[@]}"; do
  read -r big small <<<"$pair"
  python3 scripts/measure_calls.py --target="$big" --draft="$small" \
    --output_json="$out/calls-${big#random:}.jsonl"
done

echo "== end to end"
end_to_end=${target:-random:smollm2-135m}
python3 -m jspec.benchmark --target="$end_to_end" --drafters=none,prompt_lookup \
  --repeats=3 --output_json="$out/benchmark.jsonl"
