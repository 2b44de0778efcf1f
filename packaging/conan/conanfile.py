"""Builds the library from the sources of this repository, with the cargo of the machine.

conan create packaging/conan                          builds it, in minutes
conan export-pkg packaging/conan -o "&:shared=True"   packages what `make lib` has built
"""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.files import copy, load, rm, rmdir

required_conan_version = ">=2.0"


class PagedLlm(ConanFile):
    name = "pagedllm"
    description = "LLM serving inside your own process: continuous batching and a paged KV cache behind a stable C ABI"
    license = "MIT"
    topics = ("llm", "inference", "paged-attention")
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False]}
    default_options = {"shared": True}

    def set_version(self):
        manifest = load(self, os.path.join(self.recipe_folder, "..", "..", "Cargo.toml"))
        self.version = re.search(r'^version = "(.*)"', manifest, re.M)[1]

    def export_sources(self):
        # Cargo needs the files of all targets in Cargo.toml, also those of tests and benchmarks.
        copy(self, "*", os.path.join(self.recipe_folder, "..", ".."), self.export_sources_folder,
             excludes=["target", "target/*", "build", "build/*", "dist/*", ".git", ".git/*", "*/node_modules/*", "*.pyc"])

    def layout(self):
        self.folders.root = os.path.join("..", "..")
        self.folders.source = "."
        self.folders.build = "."
        self.folders.generators = os.path.join("build", "conan-generators")

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch not in ("x86_64", "armv8"):
            raise ConanInvalidConfiguration(f"pagedllm runs on Linux on x86_64 and armv8 ({self.settings.os}, {self.settings.arch})")

    def package_id(self):
        # Rust builds it, always optimized: neither the C++ compiler nor the build type matters.
        del self.info.settings.compiler
        del self.info.settings.build_type

    def build(self):
        self.run("cargo build --release --locked --lib")

    def package(self):
        self.run(f"bash scripts/install.sh '{self.package_folder}'", cwd=self.build_folder)
        # Conan generates these files, and a package has one of the two libraries.
        rmdir(self, os.path.join(self.package_folder, "lib", "cmake"))
        rmdir(self, os.path.join(self.package_folder, "lib", "pkgconfig"))
        for folder in ("bin", os.path.join("share", "pagedllm")):  # the tool and other languages
            rmdir(self, os.path.join(self.package_folder, folder))
        rm(self, "licences-of-tool.txt", os.path.join(self.package_folder, "share", "doc", "pagedllm"))
        rm(self, "*.a" if self.options.shared else "*.so*", os.path.join(self.package_folder, "lib"))
        copy(self, "LICENSE", self.build_folder, os.path.join(self.package_folder, "licenses"))
        copy(self, "licences-of-dependencies.txt", os.path.join(self.package_folder, "share", "doc", "pagedllm"),
             os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        self.cpp_info.libs = ["pagedllm"]
        self.cpp_info.set_property("cmake_file_name", "pagedllm")
        self.cpp_info.set_property("cmake_target_name", "pagedllm::pagedllm")
        self.cpp_info.set_property("pkg_config_name", "pagedllm")
        if not self.options.shared:
            self.cpp_info.system_libs = ["m", "gcc_s"]
