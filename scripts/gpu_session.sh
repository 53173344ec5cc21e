#!/usr/bin/env bash
# One command for a machine with a GPU and no network, under 10 minutes: the laws, then the times.
#
#   scripts/gpu_session.sh [RESULTS_FOLDER] [TARGET]
#
# RESULTS_FOLDER is benchmarks/results/<date>-<backend> by default. TARGET is a model with real text
# (a folder or a .gguf file); without it only random weights run. On a machine without a GPU
# everything runs at small shapes, to test the session itself. The shapes can be set:
#
#   PAIRS="target,draft ..." REPEATS=7 TESTS="tests/..." PYTHON=python3
#   BENCHMARK_FLAGS="--num_prompts=4 --max_new_tokens=64" RULES="rejection block" NUM_ROWS=2048
#   COMPARE_FLAGS="--repeats=3" QUANTIZED="random:llama3.2-1b" SYNTHETIC_FLAGS="--drafters=..."
#
# ANSWERS=answers.jsonl (of scripts/make_answers.py, with TARGET) trains a head of EAGLE-3 first, into
# RESULTS_FOLDER/eagle, with TRAIN_FLAGS; HEAD=FOLDER takes one that is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

backend=$("$python" -c 'import jax; print(jax.default_backend())')
out=${1:-benchmarks/results/$(date +%F)-$backend}
target=${2:-}
mkdir -p "$out"

if [ "$backend" = gpu ]; then
  pairs=${PAIRS:-random:llama3.2-3b,random:llama3.2-1b random:llama3.1-8b,random:llama3.2-1b}
  repeats=${REPEATS:-7}
  tests=${TESTS:-tests/speculation tests/drafters tests/test_sampling.py}
  benchmark_flags=${BENCHMARK_FLAGS:---repeats=3}
  rules=${RULES:-rejection block coupled}
  num_rows=${NUM_ROWS:-16384}
  compare_flags=${COMPARE_FLAGS:---repeats=3 --max_new_tokens=64}
  quantized=${QUANTIZED:-random:llama3.2-1b random:llama3.1-8b}
  synthetic_flags=${SYNTHETIC_FLAGS:---drafters=none,model:2,model:5 --num_prompts=2 --repeats=3
    --synthetic_acceptance=0.6,0.7,0.8,0.9}
else
  echo "no GPU here (JAX's backend is $backend): a rehearsal at small shapes, its times mean nothing"
  pairs=${PAIRS:-random:smollm2-135m,random:smollm2-135m:1}
  repeats=${REPEATS:-1}
  tests=${TESTS:-tests/drafters/test_prompt_lookup.py}
  benchmark_flags=${BENCHMARK_FLAGS:---repeats=1 --num_prompts=1 --max_new_tokens=8}
  rules=${RULES:-rejection}
  num_rows=${NUM_ROWS:-256}
  compare_flags=${COMPARE_FLAGS:---repeats=1 --per_category=1 --max_new_tokens=8}
  quantized=${QUANTIZED:-random:smollm2-135m}
  synthetic_flags=${SYNTHETIC_FLAGS:---drafters=none,model:2 --num_prompts=1 --repeats=1
    --max_new_tokens=8 --synthetic_acceptance=0.8}
fi

# The rest runs even where a law is broken; the status says it at the end.
status=0
echo "== laws"
: >"$out/laws.txt"
# The marker of the tests in test_gpu.py; without a GPU they skip themselves.
# shellcheck disable=SC2086  # lists of words
for selection in "-m gpu tests/test_gpu.py" "$tests"; do
  "$python" -m pytest -q $selection 2>&1 | tail -n 15 | tee -a "$out/laws.txt" ||
    status=1
done

echo "== audits"
for rule in $rules; do
  "$python" -m jspec.audit --target="${target:-random:smollm2-135m}" --acceptance="$rule" \
    --num_rows="$num_rows" --output_json="$out/audit-$rule.json" || status=1
done

echo "== parts of a round, random weights"
for pair in $pairs; do
  big=${pair%,*} small=${pair#*,}
  "$python" -m jspec.benchmark --roofline --target="$big" --draft="$small" \
    --drafters=none,prompt_lookup:4,model:4 --output_json="$out/roofline-${big#random:}.jsonl" ||
    status=1
done

echo "== speed against acceptance, random weights"
for pair in $pairs; do
  big=${pair%,*} small=${pair#*,}
  for quantization in none int8; do
    # shellcheck disable=SC2086
    "$python" -m jspec.benchmark --target="$big" --draft="$small" \
      --draft_quantization="$quantization" $synthetic_flags \
      --output_json="$out/synthetic-${big#random:}-$quantization.jsonl" || status=1
  done
done

head=${HEAD:-}
if [ -n "${ANSWERS:-}" ]; then
  echo "== a head"
  # shellcheck disable=SC2086
  "$python" -m jspec.train --config=configs/train_eagle.py --config.target="$target" \
    --config.texts="(\"$ANSWERS\",)" --workdir="$out/training" \
    ${TRAIN_FLAGS:---config.batch_size=16 --config.recipe.num_steps=2000} &&
    "$python" scripts/convert_weights.py --source="$out/training/head" --dtype=int8 \
      --output="$out/eagle" && head="$out/eagle" || status=1
fi

echo "== end to end"
# shellcheck disable=SC2086
"$python" -m jspec.benchmark --target="${target:-random:smollm2-135m}" \
  --drafters=none,prompt_lookup $benchmark_flags --output_json="$out/benchmark.jsonl" || status=1

echo "== drafters"
"$python" scripts/measure_drafting.py --repeats="$repeats" --round_ms=10 \
  --output_json="$out/drafting.jsonl" || status=1
# shellcheck disable=SC2086
"$python" scripts/compare_drafters.py --target="${target:-random:smollm2-135m}" \
  --drafters="none,prompt_lookup:1,prompt_lookup:3,prompt_lookup:7,prompt_lookup:auto,ngram\
${head:+,eagle:1,eagle:3,eagle:5}" ${head:+--draft_head="$head"} \
  $compare_flags --output_json="$out/drafters.jsonl" || status=1
for model in $quantized; do
  "$python" scripts/measure_quantization.py --model="$model" --repeats="$repeats" \
    --output_json="$out/quantization-${model#random:}.jsonl" || status=1
done

echo "results in $out, status $status"
exit "$status"
