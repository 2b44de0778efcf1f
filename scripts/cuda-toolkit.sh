#!/usr/bin/env bash
# usage: cuda-toolkit.sh
# Installs the CUDA compiler into target/cuda-toolkit, where build.rs searches for it. All packages are
# from one release of NVIDIA, because others do not work together. Needs python3 with pip and a network
# connection, but no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
toolkit=target/cuda-toolkit
packages=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85)

[ "$(cat "$toolkit/installed" 2>/dev/null)" = "${packages[*]}" ] && exit 0
echo "installing the CUDA compiler into $toolkit"
rm -rf "$toolkit" "$toolkit.unfinished"
mkdir -p "$toolkit.unfinished"
python3 -m pip install --quiet --no-deps --disable-pip-version-check --root-user-action=ignore --target "$toolkit.unfinished" "${packages[@]}"
mv "$toolkit.unfinished/nvidia/cu13" "$toolkit"
rm -rf "$toolkit.unfinished"
chmod +x "$toolkit"/bin/* "$toolkit"/nvvm/bin/*
echo "${packages[*]}" >"$toolkit/installed"
touch build.rs
