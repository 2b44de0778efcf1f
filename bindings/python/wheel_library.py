"""Hook of hatchling: adds the library to the wheel, which is then for one platform and any Python 3."""

import os
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelLibrary(BuildHookInterface):
    def initialize(self, version, build_data):
        folder = os.environ.get("PAGEDLLM_WHEEL_FILES")
        if not folder:
            raise RuntimeError("PAGEDLLM_WHEEL_FILES is not set; run `make wheel` in the root of the repository")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][f"{folder}/libpagedllm.so"] = "pagedllm/libpagedllm.so"
        for text in ("LICENSE", "licences-of-dependencies.txt"):
            build_data["force_include"][f"{folder}/{text}"] = f"pagedllm/{text}"
