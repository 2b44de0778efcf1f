"""usage: check.py PAGEDLLM_REPLAY MODEL_DIR
Records a journal through the Python wrapper. pagedllm-replay must reproduce it bit for bit, and must
fail with a message for a journal that was changed, cut off, or written for another model."""
import hashlib
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bindings" / "python"))
from pagedllm import Engine, Sampling  # noqa: E402

# Length of the magic number and the version before the first record.
START = 12
# Length of the length and the checksum of each record.
FRAME = 12
# First byte of a record of this kind.
ENDED = 1


def record(journal, model):
    """Runs four requests, of which one is aborted, and forks and resumes a conversation."""
    with Engine(model, journal_path=journal, kv_bytes=1 << 20, host_steps=True) as engine:
        ids = [engine.add(f"Once upon a time, {i}", Sampling(max_tokens=30 + i, seed=i)) for i in range(4)]
        kept = engine.add("The capital of France", Sampling(max_tokens=8, seed=7), keep=True)
        engine.step()
        engine.abort(ids[2])
        while engine.step().unfinished:
            engine.queue.poll(0)
        engine.fork(kept, 2, seed=11)
        engine.resume(kept, Sampling(max_tokens=12, temperature=0), keep=True)
        while engine.step().unfinished:
            engine.queue.poll(0)


def frames(journal):
    """Yields offset and content of each record. The first one is the header."""
    at = START
    while at < len(journal):
        length, = struct.unpack_from("<I", journal, at)
        yield at, journal[at + FRAME:at + FRAME + length]
        at += FRAME + length


def write_record(journal, at, content):
    frame = struct.pack("<I", len(content)) + hashlib.sha256(content).digest()[:8] + content
    return journal[:at] + frame + journal[at + len(frame):]


def forged(journal):
    """Returns the journal with another last byte in a result, and a valid checksum."""
    at, content = next((at, content) for at, content in frames(journal) if at > START and content[0] == ENDED)
    return write_record(journal, at, content[:-1] + bytes([content[-1] ^ 1]))


def for_another_model(journal):
    at, header = next(frames(journal))
    first = header.index(b'"model":[') + len(b'"model":[')
    end = header.index(b",", first)
    other = str((int(header[first:end]) + 1) % 10 + 100 * (end - first == 3) + 10 * (end - first == 2)).encode()
    return write_record(journal, at, header[:first] + other + header[end:])


def main(replay, model):
    def check(content, status, message):
        path = folder / "altered"
        path.write_bytes(content)
        done = subprocess.run([replay, path, model], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == status and message in done.stdout, f"expected {status} and {message!r}, was {done.returncode}:\n{done.stdout}"
        return done.stdout.replace("\n", "; ")

    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        record(folder / "journal", model)
        journal = (folder / "journal").read_bytes()
        print(check(journal, 0, "the same, bit for bit"))
        last = [at for at, _ in frames(journal)][-1]
        check(journal[:last], 0, "the journal was not closed")
        check(forged(journal), 1, "different in step ")
        check(journal[:-100], 3, "the journal is damaged or cut off after ")
        middle = len(journal) // 2
        check(journal[:middle] + bytes([journal[middle] ^ 1]) + journal[middle + 1:], 3, "the journal is damaged or cut off after ")
        check(journal[:8] + struct.pack("<I", 99) + journal[12:], 2, "journal of another release (format 99, library ")
        check(for_another_model(journal), 2, "; pass the directory of the model that it was written with")
        check(journal[:20], 2, "not a journal, or its start is damaged")
        check(b"", 2, "not a journal, or its start is damaged")
        missing = subprocess.run([replay, folder / "nowhere", model], stderr=subprocess.PIPE, text=True)
        assert missing.returncode == 2 and "no such file" in missing.stderr, missing
    finally:
        shutil.rmtree(folder)


main(*sys.argv[1:])
