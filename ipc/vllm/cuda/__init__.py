"""KV memory on an NVIDIA GPU: the worker process lets the GPU copy between it and the arena.

    engine's thread ── fence ──┐ events on the engine's stream
                               ▼
    copy threads ── Lane ── own stream: wait for the fence, batched copy, record ── wait for that event ── report
                     │
                     ├─ extent in pinned memory: straight to and from the arena
                     └─ else: through the lane's small pinned staging memory

    pin thread ── Pinner ── one Registration per attachment: the arena, pinned piece by piece

What the rest relies on:
  * A lane returns, or raises, only when its stream is idle.  So the guard of the arena, which the copy threads hold
    meanwhile, covers the GPU's copies as it covers the CPU's.
  * An arena is unpinned only when its guard is revoked and idle, and unmapped only after that: a `Registration` holds
    the mapping.
  * No Python runs on a stream, we allocate no GPU memory, and no wait holds the interpreter.
  * What CUDA answers with an error ends the job, and the memory for good (`CudaMemory.problem`).

Only `driver.py` knows torch, and only it and `libcuda.py` CUDA's library; everything else runs, and is tested, on a
driver whose GPU is host memory.
"""
