#!/usr/bin/env bash
# One command for a machine with a GPU and no network, under 10 minutes: the laws, then the times.
# Without a GPU it rehearses for up to 30.
#
#   scripts/gpu_session.sh [RESULTS_FOLDER] [TARGET]
#
# RESULTS_FOLDER is benchmarks/results/<date>-<backend> by default. TARGET is a model with real text
# (a folder or a .gguf file); without it only random weights run. On a machine without a GPU
# everything runs at small shapes, to test the session itself.
#
# Every step ends after its share of LIMIT seconds at the latest; what does not fit is left out, and
# said to be. STEPS names what is wanted, so that several calls can do it all. BACKEND=gpu refuses a
# machine on which JAX sees none.
#
#   LIMIT=580 (1800 without a GPU)
#   STEPS="laws audits roofline synthetic peers options profile head drafters quantization"
#
# The shapes can be set, too:
#
#   PAIRS="target,draft ..." REPEATS=7 TESTS="tests/..." PYTHON=python3 PEERS="target,draft"
#   BENCHMARK_FLAGS="--num_prompts=4 --max_new_tokens=64" RULES="rejection block" NUM_ROWS=16384
#   COMPARE_FLAGS="--repeats=3" QUANTIZED="random:llama3.2-1b" SYNTHETIC_FLAGS="--drafters=..."
#   XLA_SETS="NAME=FLAG;FLAG NAME=FLAG ..."
#
# ANSWERS=answers.jsonl (of scripts/make_answers.py, with TARGET) trains a head of EAGLE-3, into
# RESULTS_FOLDER/eagle, with TRAIN_FLAGS; HEAD=FOLDER takes one that is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
all_steps="laws audits roofline synthetic peers options profile head drafters quantization"
steps=${STEPS:-$all_steps}
for step in $steps; do
  [[ " $all_steps " == *" $step "* ]] || { echo "expected STEPS among $all_steps, got $step"; exit 2; }
done
if [ -n "${ANSWERS:-}" ] && [ -z "${2:-}" ]; then
  echo "expected TARGET with ANSWERS: whose answers they are"
  exit 2
fi

backend=$("$python" -c 'import jax; print(jax.default_backend())')
if [ -n "${BACKEND:-}" ] && [ "$backend" != "$BACKEND" ]; then
  echo "expected a machine on which JAX's backend is $BACKEND, got $backend"
  exit 2
fi
out=${1:-benchmarks/results/$(date +%F)-$backend}
target=${2:-}
real=${target:-random:smollm2-135m}
mkdir -p "$out"

if [ "$backend" = gpu ]; then
  limit=${LIMIT:-580}
  pairs=${PAIRS:-random:llama3.2-3b,random:llama3.2-1b random:llama3.1-8b,random:llama3.2-1b}
  repeats=${REPEATS:-7}
  tests=${TESTS:-tests/speculation tests/test_sampling.py}
  benchmark_flags=${BENCHMARK_FLAGS:---repeats=3 --num_prompts=4 --max_new_tokens=64}
  rules=${RULES:-rejection block coupled}
  num_rows=${NUM_ROWS:-16384}
  peers=${PEERS:-random:llama3.2-3b,random:llama3.2-1b}
  compare_flags=${COMPARE_FLAGS:---repeats=3 --max_new_tokens=64}
  quantized=${QUANTIZED:-random:llama3.2-1b random:llama3.1-8b}
  synthetic_flags=${SYNTHETIC_FLAGS:---drafters=none,model:2,model:5 --num_prompts=2 --repeats=3
    --synthetic_acceptance=0.6,0.7,0.8,0.9}
else
  echo "no GPU here (JAX's backend is $backend): a rehearsal at small shapes, its times mean nothing"
  limit=${LIMIT:-1800}
  pairs=${PAIRS:-random:smollm2-135m,random:smollm2-135m:1}
  repeats=${REPEATS:-1}
  tests=${TESTS:-tests/drafters/test_prompt_lookup.py}
  benchmark_flags=${BENCHMARK_FLAGS:---repeats=1 --num_prompts=1 --max_new_tokens=8}
  rules=${RULES:-rejection}
  num_rows=${NUM_ROWS:-2048}
  peers=${PEERS:-random:smollm2-135m,random:smollm2-135m:1}
  compare_flags=${COMPARE_FLAGS:---repeats=1 --per_category=1 --max_new_tokens=8}
  quantized=${QUANTIZED:-random:smollm2-135m}
  synthetic_flags=${SYNTHETIC_FLAGS:---drafters=none,model:2 --num_prompts=1 --repeats=1
    --max_new_tokens=8 --synthetic_acceptance=0.8}
fi
# XLA_FLAGS must not be blank: autotuning at level 4 is XLA's own choice.
xla_sets=${XLA_SETS:-default= loops=--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL
  none=--xla_gpu_enable_command_buffer= triton=--xla_gpu_triton_gemm_any=true}

# The rest runs even where a step fails; the status says it at the end.
status=0

wants() { [[ " $steps " == *" $1 "* ]]; }

# COMMAND, within the step's share of the limit.
run() {
  local left=$((until - SECONDS))
  if [ "$left" -lt 5 ]; then
    echo "left out, its time is over: $*"
    status=1
    return 1
  fi
  timeout -k 10 "$left" "$@" || {
    echo "failed, or ended after $left s: $*"
    status=1
    return 1
  }
}

benchmark() { run "$python" -m jspec.benchmark "$@" || true; }

short() { echo "${1#random:}"; }

# Lists of words are split where they are used.
# shellcheck disable=SC2086
laws() { # the marker is that of the tests in test_gpu.py, which skip themselves without a GPU
  run "$python" -m pytest -q -m gpu tests/test_gpu.py >"$out/laws.txt" 2>&1 || true
  run "$python" -m pytest -q $tests >>"$out/laws.txt" 2>&1 || true
  grep -E "passed|failed|skipped|left out|ended" "$out/laws.txt" || true
}

audits() {
  local rule dtype
  for dtype in float32 bfloat16; do
    for rule in $rules; do
      run "$python" -m jspec.audit --target="$real" --acceptance="$rule" --num_rows="$num_rows" \
        --dtype="$dtype" --output_json="$out/audit-$rule-$dtype.json" || true
    done
  done
}

roofline() { # the parts of a round; a draft is measured with the first target that has it
  local pair big small seen=" "
  for pair in $pairs; do
    big=${pair%,*} small=${pair#*,}
    if [[ "$seen" == *" $small "* ]]; then
      benchmark --roofline --target="$big" --drafters=none,prompt_lookup:4 \
        --output_json="$out/roofline-$(short "$big").jsonl"
    else
      benchmark --roofline --target="$big" --draft="$small" --drafters=none,prompt_lookup:4,model:4 \
        --output_json="$out/roofline-$(short "$big").jsonl"
      seen+="$small "
    fi
  done
}

synthetic() { # speed against acceptance, beside Theorem 3.8
  local pair quantization
  for pair in $pairs; do
    for quantization in none int8; do
      # shellcheck disable=SC2086
      benchmark --target="${pair%,*}" --draft="${pair#*,}" --draft_quantization="$quantization" \
        $synthetic_flags --output_json="$out/synthetic-$(short "${pair%,*}")-$quantization.jsonl"
    done
  done
}

peers() { # transformers: plain, compiled over a static cache, prompt lookup, assisted generation
  local pair
  for pair in $peers; do
    # shellcheck disable=SC2086  # torch needs room beside JAX
    XLA_PYTHON_CLIENT_PREALLOCATE=false benchmark --target="${pair%,*}" --draft="${pair#*,}" \
      --drafters=none,prompt_lookup:5,model:5 --transformers --compiled \
      $benchmark_flags --output_json="$out/peers-$(short "${pair%,*}").jsonl"
  done
}

options() { # what XLA's options change; +WHILE puts whole loops into one launch
  local set
  for set in $xla_sets; do
    # shellcheck disable=SC2086
    XLA_FLAGS="${XLA_FLAGS:---xla_gpu_autotune_level=4} $(tr ';' ' ' <<<"${set#*=}")" benchmark \
      --notransformers --target="${pairs##*,}" --drafters=none,prompt_lookup:5 $benchmark_flags \
      --output_json="$out/options-${set%%=*}.jsonl"
  done
}

profile() {
  run "$python" -m scripts.profile_rounds --target="${pairs##*,}" --drafter=prompt_lookup \
    --max_new_tokens=32 --output_json="$out/profile.jsonl" || true
}

head=${HEAD:-}

head() {
  [ -n "${ANSWERS:-}" ] || return 0
  # shellcheck disable=SC2086
  run "$python" -m jspec.train --config=configs/train_eagle.py --config.target="$target" \
    --config.texts="(\"$ANSWERS\",)" --workdir="$out/training" \
    ${TRAIN_FLAGS:---config.batch_size=16 --config.recipe.num_steps=2000} || return 0
  run "$python" scripts/convert_weights.py --source="$out/training/head" --dtype=int8 \
    --output="$out/eagle" || return 0
  head=$out/eagle
}

drafters() { # real text, where TARGET is given
  run "$python" scripts/measure_drafting.py --repeats="$repeats" --round_ms=10 \
    --output_json="$out/drafting.jsonl" || true
  # shellcheck disable=SC2086
  run "$python" scripts/compare_drafters.py --target="$real" \
    --drafters="none,prompt_lookup:1,prompt_lookup:3,prompt_lookup:7,prompt_lookup:auto,ngram\
,layer_skip:2,eagle:1,eagle:3,eagle:5,prompt_lookup+eagle:2" --draft_layers=20 \
    --draft_head="${head:-shipped:smollm2-135m-instruct}" $compare_flags \
    --output_json="$out/drafters.jsonl" || true
}

quantization() {
  local model
  for model in $quantized; do
    run "$python" scripts/measure_quantization.py --model="$model" --repeats="$repeats" \
      --output_json="$out/quantization-$(short "$model").jsonl" || true
  done
}

# Each step has twice its even share of what is left: most need less.
set -- $steps
for step in $all_steps; do
  wants "$step" || continue
  until=$((SECONDS + 2 * (limit - SECONDS) / $#))
  until=$((until < limit ? until : limit))
  [ $# -le 1 ] || shift
  echo "== $step, at most $((until - SECONDS)) s"
  "$step"
done

# Pictures need matplotlib; without it, or on another machine, the same command does it later.
shopt -s nullglob
records=("$out"/roofline-*.jsonl "$out"/synthetic-*.jsonl)
[ ${#records[@]} = 0 ] || timeout -k 2 15 "$python" scripts/plot_results.py "${records[@]}" || true

echo "results in $out, $SECONDS s, status $status"
exit "$status"
