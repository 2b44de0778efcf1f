#!/usr/bin/env bash
# usage: nixl.sh FOLDER
# Installs the parts of NIXL that the tests need into FOLDER: the C API and the UCX backend without its
# modules for RDMA and CUDA. They are those of the wheel in requirements.txt. On a machine without such a
# wheel, FOLDER gets the file `unavailable` with the reason.
set -euo pipefail
requirements=$(cd "$(dirname "$0")" && pwd)/requirements.txt
mkdir -p "$1"
cd "$1"
cmp -s "$requirements" requirements.txt && exit
machine=$(uname -m)
if [ "$(uname -s)" != Linux ] || { [ "$machine" != x86_64 ] && [ "$machine" != aarch64 ]; } || ! getconf GNU_LIBC_VERSION > /dev/null 2>&1; then
    echo "NIXL has no wheel for $(uname -s) on $machine" > unavailable
    exit
fi
# Only libraries of C and C++ are needed, so that the version of Python does not matter.
wheel=$(mktemp -d)
trap 'rm -rf "$wheel"' EXIT
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --implementation cp --abi cp311 \
    --platform "manylinux_2_28_$machine" --dest "$wheel" -r "$requirements"
python3 - "$wheel"/*.whl << 'END'
import re
import sys
import zipfile

NEEDED = re.compile(r"\.nixl_cu12\.mesonpy\.libs/(lib(nixl|nixl_build|nixl_capi|nixl_common|serdes|stream)|plugins/libplugin_UCX)\.so"
                    r"|nixl_cu12\.libs/lib(absl|upb|utf8|uc[mpst]-|grpc|gpr|re2|address_sorting|protobuf|etcd)[^/]*")
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(members=[name for name in wheel.namelist() if NEEDED.fullmatch(name)])
END
cp "$requirements" requirements.txt
