#!/usr/bin/env python3
"""Licences of the crates that are linked into the library.

licences.py            prints docs/licences.md
licences.py --check    fails if that file is stale or a licence is not permissive
licences.py --texts    prints every licence text, for the packages
"""
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "licences.md"
PERMISSIVE = {
    "MIT", "MIT-0", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Zlib", "Unicode-3.0",
    "Unlicense", "CC0-1.0", "0BSD", "BSL-1.0",
}
HEAD = """# Licences of dependencies

The crates that are linked into the library. `scripts/licences.py` writes this page. `make lint` fails
if a crate has no permissive licence. `onig_sys` contains the C library Oniguruma (BSD-2-Clause).
`make install` and `make dist` install the texts as
`share/doc/pagedllm/licences-of-dependencies.txt`.

| Crate | Version | Licence |
| --- | --- | --- |
"""


def crates():
    """Yields (name, version, licence, folder) of each linked crate except the project's own."""
    target = next(line.split()[1] for line in run("rustc", "-vV").splitlines() if line.startswith("host:"))
    tree = run("cargo", "tree", "--locked", "-e", "normal,no-proc-macro", "--target", target, "--prefix", "none", "-f", "{p}")
    linked = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
    metadata = json.loads(run("cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target))
    for package in sorted(metadata["packages"], key=lambda package: (package["name"], package["version"])):
        if package["source"] and (package["name"], "v" + package["version"]) in linked:
            folder = pathlib.Path(package["manifest_path"]).parent
            yield package["name"], package["version"], package["license"] or "none stated", folder


def run(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def permissive(licence):
    """Returns True if one alternative of the expression has permissive licences only."""
    choices = re.split(r"\s+OR\s+|/", licence.replace("(", "").replace(")", ""))
    return any(all(part.strip() in PERMISSIVE for part in choice.split(" AND ")) for choice in choices)


def texts(folder):
    return sorted(file for file in folder.rglob("*") if re.match(r"(licen[sc]e|copying|notice|unlicense)", file.name, re.I) and file.is_file())


def main():
    found = list(crates())
    table = HEAD + "".join(f"| {name} | {version} | {licence} |\n" for name, version, licence, _ in found)
    if "--texts" in sys.argv:
        for name, version, licence, folder in found:
            print(f"==== {name} {version}: {licence}\n")
            for file in texts(folder):
                print(f"---- {file.relative_to(folder)}\n\n{file.read_text(errors='replace')}\n")
    elif "--check" in sys.argv:
        bad = [f"{name} {version}: {licence}" for name, version, licence, _ in found if not permissive(licence)]
        if bad:
            sys.exit("licences that are not permissive: " + ", ".join(bad))
        if TABLE.read_text() != table:
            sys.exit("docs/licences.md is stale: run scripts/licences.py > docs/licences.md")
    else:
        print(table, end="")


main()
