#!/usr/bin/env bash
# usage: cuda-toolkit.sh
# Installs the CUDA compiler into target/cuda-toolkit, where build.rs searches for it. The packages are
# from one release of NVIDIA, because others do not work together. Only ptxas is from the last release of
# CUDA 12, because the machine code of later ones needs a driver for CUDA 13; build.rs declares a PTX
# version that it accepts. The packages of CUDA 12 have no nvcc. Needs python3 with pip and a network
# connection, but no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
toolkit=target/cuda-toolkit
packages=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)
assembler=nvidia-cuda-nvcc-cu12==12.9.86

[ "$(cat "$toolkit/installed" 2>/dev/null)" = "${packages[*]} $assembler" ] && exit 0
echo "installing the CUDA compiler into $toolkit"
rm -rf "$toolkit" "$toolkit.unfinished"
mkdir -p "$toolkit.unfinished"
python3 -m pip install --quiet --no-deps --disable-pip-version-check --root-user-action=ignore --target "$toolkit.unfinished" \
    "${packages[@]}" "$assembler"
mv "$toolkit.unfinished/nvidia/cu13" "$toolkit"
mkdir -p "$toolkit/cuda12/bin"
mv "$toolkit.unfinished/nvidia/cuda_nvcc/bin/ptxas" "$toolkit/cuda12/bin/ptxas"
rm -rf "$toolkit.unfinished"
chmod +x "$toolkit"/bin/* "$toolkit"/nvvm/bin/* "$toolkit"/cuda12/bin/*
echo "${packages[*]} $assembler" >"$toolkit/installed"
touch build.rs
