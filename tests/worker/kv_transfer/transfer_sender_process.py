"""A sender in a process of its own: prints the ticket of one offer (JSON), and waits for the end.

Arguments: block bytes, blocks offered, seed of the bytes.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import transfer_stand as stand

from pigou.worker.kv_transfer.sender import Sender


def main() -> None:
    block_bytes, count, seed = (int(arg) for arg in sys.argv[1:4])
    memory = stand.memory(block_bytes)
    store = stand.filled(memory, block_bytes, seed)
    sender = Sender(store, lambda _: None, stand.config(), memory)
    params = sender.offer("r", np.arange(count, dtype=np.int32), count * stand.BLOCK_SIZE)
    print(json.dumps(params | {"shared": memory.name}), flush=True)
    sys.stdin.read()
    sender.close()
    memory.close()


main()
