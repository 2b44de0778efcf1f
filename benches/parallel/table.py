"""Reads the lines of run.sh and prints the medians, and the ratios to one process with two threads."""
import statistics
import sys

NAMES = {"2 1 1": "one process, two threads", "1 1 1": "one process, one thread",
         "1 2 1": "tensor parallel, two processes", "1 1 2": "pipeline parallel, two processes"}
COLUMNS = ["decode, 1 sequence", "decode, 8 sequences", "decode, 32 sequences", "prompts of 512"]


def main():
    speeds = {}
    for line in sys.stdin:
        fields = line.split()
        speeds.setdefault(" ".join(fields[:3]), []).append([float(field) for field in fields[3:]])
    base = speeds["2 1 1"]
    print(f"| tokens per second (ratio) | {' | '.join(COLUMNS)} |")
    print("| --- |" + " --- |" * len(COLUMNS))
    for division, rows in speeds.items():
        cells = []
        for column in range(len(COLUMNS)):
            # Each repetition has a pair.
            ratio = statistics.median(row[column] / other[column] for row, other in zip(rows, base))
            cells.append(f"{statistics.median(row[column] for row in rows):.1f} ({ratio:.2f})")
        print(f"| {NAMES[division]} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
