#!/usr/bin/env bash
# Audits every drafter on one target, at temperatures 0 and 1, with penalties, one after another.
#
#   scripts/audit_drafters.sh [RESULTS_FOLDER]
#
# Prints a line an audit: seconds, status, verdict. Its output and its record stay in the folder,
# benchmarks/results/<date>-audits by default; one whose record is there is not run again. What can
# be set:
#
#   TARGET=smollm2-135m-instruct DRAFT="--draft=... --draft_quantization=int4" LAYERS=20
#   SUBSET=0-9,20-29 PATTERN=... NUM_ROWS=512 MAX_NEW_TOKENS=32 TABLE=... ONLY="ngram model"
#   PENALTIES="--repetition_penalty=1.2" TEMPERATURES="0 1" PYTHON=python3
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${1:-benchmarks/results/$(date +%F)-audits}
target=${TARGET:-smollm2-135m-instruct}
draft=${DRAFT:---draft=$target --draft_quantization=int4}
layers=${LAYERS:-20}
subset=${SUBSET:-0-9,20-29}
penalties=${PENALTIES:---repetition_penalty=1.2 --presence_penalty=0.3 --logit_bias=28:0.5,30:-0.5}
# Behind each of the four tokens that SmolLM2's rows are made of something is forced.
pattern=${PATTERN:--,\\n|,- and|\\n-,| and--}
num_rows=${NUM_ROWS:-512}
table=${TABLE:-$out/table.safetensors}
mkdir -p "$out"

if [ ! -e "$table" ]; then  # counts of the target's own answers
  "$python" -m jspec.generate --target="$target" --prompts_file=configs/prompts.jsonl \
    --drafter=none --temperature=1 --max_new_tokens=64 --nostats \
    --output_json="$out/answers.jsonl" >"$out/answers.txt" 2>&1 &&
    "$python" scripts/count_ngrams.py --target="$target" --input="$out/answers.jsonl" \
      --output="$table" || exit
fi

status=0
# audit NAME FLAGS...: both temperatures; all rows of temperature 0 are alike.
audit() {
  local name=$1 begin log flags verdict
  shift
  if [ -n "${ONLY:-}" ] && [[ " $ONLY " != *" $name "* ]]; then return; fi
  for temperature in ${TEMPERATURES:-0 1}; do
    log=$out/$name-t$temperature
    if [ -e "$log.json" ]; then continue; fi
    flags="--acceptance=rejection --num_rows=$num_rows"
    if [ "$temperature" = 0 ]; then flags="--acceptance=greedy --num_rows=128"; fi
    begin=$SECONDS
    # shellcheck disable=SC2086  # lists of words
    "$python" -m jspec.audit --target="$target" --temperature="$temperature" $flags $penalties \
      --max_new_tokens="${MAX_NEW_TOKENS:-32}" --output_json="$log.json" "$@" >"$log.txt" 2>&1
    verdict=$?
    if [ $verdict != 0 ]; then status=1; fi
    echo "$((SECONDS - begin)) s, status $verdict: $(tail -n 1 "$log.txt")"
  done
}

audit prompt_lookup --drafter=prompt_lookup
audit prompt_lookup-auto --drafter=prompt_lookup --num_draft_tokens=auto
audit ngram --drafter=ngram
audit ngram-sampled --drafter=ngram --ngram_probs=sampled
audit unigram --drafter=unigram --draft_table="$table"
audit bigram --drafter=bigram --draft_table="$table"
audit random --drafter=random
audit pattern --drafter=pattern --draft_pattern="$pattern"
audit layer_skip --drafter=layer_skip --draft_layers="$layers"
audit layer_skip-subset --drafter=layer_skip --draft_layers="$subset"
# shellcheck disable=SC2086
audit model $draft --drafter=model
# shellcheck disable=SC2086
audit hierarchical $draft --drafter=hierarchical
# shellcheck disable=SC2086
audit prompt_lookup+model $draft --drafter=prompt_lookup+model
audit ngram+layer_skip+unigram --drafter=ngram+layer_skip+unigram --draft_layers="$layers" \
  --draft_table="$table" --draft_confidence=0.3

echo "logs in $out, status $status"
exit "$status"
