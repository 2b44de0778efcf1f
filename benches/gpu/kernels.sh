#!/usr/bin/env bash
# usage: [MIN_BLAS_ROWS=N] [MAX_NORMED_ROWS=N] kernels.sh
# How fast are the kernels, compared with the limits of the device, torch, cuBLASLt and FlashInfer. With MIN_BLAS_ROWS
# the part products uses cuBLASLt from N rows on. With MAX_NORMED_ROWS the part fusions begins products of up to N rows
# with norms.
. "$(dirname "$0")/common.sh"

peer ceilings 30 torch peers.py ceilings "$work/ceilings"
ours paged-attention 70
peer paged_peer 20 torch peers.py paged "$lines/paged-attention.jsonl"
ours decode-attention 50
ours prefill-attention 40
peer attention_peer 30 torch peers.py attention "$lines/prefill-attention.jsonl"
ours latent-attention 30
ours thresholds 50
ours products 80
peer products_peer 40 torch peers.py products "$lines/products.jsonl"
ours fusions 20
ours draws 30
peer flashinfer 50 torch flashinfer_peer.py "$lines"/{paged,decode,prefill}-attention.jsonl
finish
