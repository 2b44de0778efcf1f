"""The engines: pagedllm through its own benchmark, each other engine through worker.py in its own Python. Each run is a new process."""

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = Path(os.environ.get("PEERS_HOME", "~/.cache/pagedllm-peers")).expanduser()

MODELS, FORMATS = ("S", "M"), ("bf16", "int8", "int4")
# Files of llama.cpp, which pagedllm and llama.cpp read both.
GGUF_FORMATS = ("q8_0", "q4_0", "q4_k_m")
CELLS = [f"{model}-{format}" for formats in (FORMATS, GGUF_FORMATS) for model in MODELS for format in formats]
ROWS = ["prefill 512", "prefill 2048", "decode at 128", "decode at 2048", "batch", "load", "peak memory"]
MAX_RUN_SECONDS = 3600
MEMORY = 6 << 30  # bytes; more than any engine uses


class RunFailed(Exception):
    pass


def execute(command, environment, title):
    """Runs a command. Its output is shown only if it fails."""
    environment = {**os.environ, **environment}
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=MAX_RUN_SECONDS, **outputs)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{title} did not finish within {MAX_RUN_SECONDS} s") from None
    if done.returncode:
        raise RunFailed(f"{title} ended with {done.returncode}: {error_line(done.stdout)}")


def error_line(output):
    """Returns the line of the output that most likely names the error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"\w(Error|Exception): ", line)]
    return ((named or lines or ["no output"])[-1])[:300]


def is_gguf(cell):
    return cell.split("-")[1] in GGUF_FORMATS


@dataclass(frozen=True)
class PagedLLM:
    name: str = "pagedllm"
    title: str = "pagedllm"

    def supports(self, cell):
        return True

    def run(self, cell, rows, threads, workload, seed):
        with tempfile.TemporaryDirectory() as work:
            answer = Path(work, "answer.json")
            bench = ["cargo", "bench", "--locked", "--bench", "cpu", "--", "--table", "--cells", cell, "--reps", "1"]
            if is_gguf(cell):
                bench += ["--gguf", str(HOME / "models" / "llama_cpp")]
            execute(bench + ["--threads", str(threads), "--json", str(answer)], {}, f"{self.title} on {cell}")
            return convert_own_results(json.loads(answer.read_text()), cell, rows)


def convert_own_results(saved, cell, rows):
    """Converts one cell of one repetition of benches/cpu to the format of worker.py."""
    [found] = [entry for entry in saved["cells"] if entry["cell"] == cell]

    def row(entry):
        [sample] = entry["samples"]
        return {
            "value": sample["value"], "limit": sample["limit"], "bandwidth": sample["bandwidth_gb_s"], "noise": sample["noise"],
        }

    return {
        "version": f"pagedllm {saved['version']} {commit()}".strip(),
        "settings": f"isa {saved['isa']}, KV in {saved['kv_dtype']}",
        "rows": {entry["name"]: row(entry) for entry in found["rows"] if entry["name"] in rows},
    }


def commit():
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip()


@dataclass(frozen=True)
class OtherEngine:
    name: str
    title: str
    suffix: str = ""  # of the converted model HOME/models/NAME/CELL
    preload: str = ""  # library of its environment for LD_PRELOAD
    environment: dict = field(default_factory=dict)

    def supports(self, cell):
        return self.suffix == ".gguf" or not is_gguf(cell)

    def run(self, cell, rows, threads, workload, seed):
        model = HOME / "models" / self.name / f"{cell}{self.suffix}"
        python = HOME / f"venv-{self.name}" / "bin" / "python"
        for needed in (model, python):
            if not needed.exists():
                raise RunFailed(f"{needed} is missing; run benches/peers/setup.sh")
        with tempfile.TemporaryDirectory() as work:
            job, answer = Path(work, "job.json"), Path(work, "answer.json")
            job.write_text(json.dumps({
                "module": f"{self.name}_engine", "model": str(model), "rows": rows, "threads": threads, "seed": seed,
                "batch": workload[cell.split("-")[0]], "probe": str(HOME / "bandwidth"), "memory": MEMORY,
                "answer": str(answer),
            }))
            execute([str(python), str(HERE / "worker.py"), str(job)], self.variables(threads), f"{self.title} on {cell}")
            return json.loads(answer.read_text())

    def variables(self, threads):
        preload = {"LD_PRELOAD": str(HOME / f"venv-{self.name}" / self.preload)} if self.preload else {}
        return {"OMP_NUM_THREADS": str(threads), "PYTHONDONTWRITEBYTECODE": "1", **preload, **self.environment}


ENGINES = {
    engine.name: engine
    for engine in (
        PagedLLM(),
        OtherEngine("openvino", "OpenVINO"),
        OtherEngine("vllm", "vLLM", preload="lib/libiomp5.so", environment={"VLLM_CACHE_ROOT": str(HOME / "vllm-cache")}),
        OtherEngine("llama_cpp", "llama.cpp", suffix=".gguf"),
    )
}
