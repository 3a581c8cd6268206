"""One run of llama.cpp for ``bench_generate``, in a process without torch, whose threads and tiles are its own:

    python generate_llama_cpp.py FILE THREADS PROMPT TOKENS [LOGITS POSITIONS]

The last line is JSON: seconds of the load, of a prompt and of a token (the median), bytes of memory at the peak. With
LOGITS nothing is timed: the logits of so many POSITIONS are written there, float32 (POSITIONS, vocabulary), bare.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path


def model_of(file, threads, positions, **options):
    from llama_cpp import Llama

    return Llama(file, n_ctx=positions + 8, n_threads=threads, n_threads_batch=threads, verbose=False, **options)


def run(file, threads, prompt, tokens):
    clock = clock_for(threads)
    start = clock()
    model = model_of(file, threads, prompt + tokens)
    figures = {"load": clock() - start}
    ids = tokens_of(model.n_vocab(), prompt + tokens)
    for _ in range(2):
        model.reset()
        start = clock()
        model.eval(ids[:prompt])
        figures["prefill"] = clock() - start
    seconds = []
    for token in ids[prompt:]:
        start = clock()
        model.eval([token])
        seconds.append(clock() - start)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return figures | {"token": statistics.median(seconds), "memory": peak}


def write_logits(file, threads, path, positions):
    model = model_of(file, threads, positions, logits_all=True)
    model.eval(tokens_of(model.n_vocab(), positions))
    model.scores[:positions].astype("float32").tofile(path)


def clock_for(threads):
    """The clock that times ``threads``: that of the processor for one, which other processes slow down least."""
    return time.process_time if threads == 1 else time.perf_counter


def tokens_of(vocabulary, count):
    return random.Random(0).choices(range(vocabulary), k=count)


if __name__ == "__main__":
    if len(sys.argv) > 5:
        write_logits(sys.argv[1], int(sys.argv[2]), sys.argv[5], int(sys.argv[6]))
    else:
        print(json.dumps(run(sys.argv[1], *map(int, sys.argv[2:]))))
