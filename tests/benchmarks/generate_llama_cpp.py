"""One run of llama.cpp for ``bench_generate``, in a process without torch, whose threads and tiles are its own:

    python generate_llama_cpp.py FILE THREADS PROMPT TOKENS

The last line is JSON: seconds of the load, of a prompt and of a token (the median), bytes of memory at the peak.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path

from llama_cpp import Llama


def run(file, threads, prompt, tokens):
    start = time.perf_counter()
    model = Llama(model_path=file, n_ctx=prompt + tokens + 8, n_threads=threads, n_threads_batch=threads, verbose=False)
    figures = {"load": time.perf_counter() - start}
    random.seed(0)
    ids = [random.randrange(model.n_vocab()) for _ in range(prompt + tokens)]
    for _ in range(2):
        model.reset()
        start = time.perf_counter()
        model.eval(ids[:prompt])
        figures["prefill"] = time.perf_counter() - start
    seconds = []
    for token in ids[prompt:]:
        start = time.perf_counter()
        model.eval([token])
        seconds.append(time.perf_counter() - start)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return figures | {"token": statistics.median(seconds), "memory": peak}


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], *map(int, sys.argv[2:]))))
