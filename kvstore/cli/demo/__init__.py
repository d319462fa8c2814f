"""``kvstore demo``: a cold run, then a second process that answers from the blocks the first one stored.

``engines`` are the models behind one protocol, ``prompt`` makes token ids, ``process`` answers in another process, ``measure`` runs and
compares, ``report`` holds and shows the result, ``command`` is the command.

Time to first token (TTFT) runs from token ids and a loaded model, after one unrelated warm-up
forward, to the logits that the first new token is chosen from. Warm, it includes opening the store,
lookup, reading with verification, restoring, and the forward over the remaining tokens. Cold, it is the
whole prefill, split in two chunks where the warm one starts, without opening or storing: the
comparison never favours the store. Both exclude imports and loading the model.
"""
