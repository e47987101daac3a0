#!/usr/bin/env bash
# Every experiment on an NVIDIA GPU: bash benchmarks/experiments_gpu.sh DIR
# Leaves in DIR: experiments_h200.json, engines_h200.json, traces.tar.gz, and dram_h200.json where
# Nsight Compute may count. PYTHON=... chooses the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$1 python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
# Two processes, so that a fault in one costs no results of the other.
"$python" -m nanoteach bench nano context batch prefill static packed paged prefix chunked \
	preemption --shape qwen3-0.6b --repeats 3 \
	--profile "$work/traces" --save "$out/experiments_h200.json"
"$python" -m nanoteach bench gemm kv_cache graphs backends kernels peers --shape qwen3-0.6b \
	--repeats 3 --profile "$work/traces" --save "$out/engines_h200.json"
mkdir -p "$work/dram"
for batch in 1 16 128; do
	ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum --profile-from-start off \
		--cache-control none --clock-control none --target-processes all --csv --log-file "$work/dram/$batch.csv" \
		"$python" -m nanoteach.bench.dram step "$batch" "$work/dram"
done
"$python" -m nanoteach.bench.dram read "$work/dram" --save "$out/dram_h200.json"
tar -czf "$out/traces.tar.gz" -C "$work" traces dram
