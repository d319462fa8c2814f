"""``kvstore demo``: a cold run, then a second process that reuses the blocks stored by the first.

``command`` is the command, ``measure`` runs and compares, ``process`` runs in another process, ``engines`` has the
models, ``prompt`` the token ids, ``report`` the result.

Time to first token (TTFT) is measured from token ids and a loaded model, after one unrelated warm-up
forward, to the logits of the first new token. The warm TTFT includes opening the store, lookup, reading
with verification, restoring, and the forward over the remaining tokens. The cold TTFT is the whole
prefill, split in two chunks where the warm one starts, without opening or storing, so the comparison
never favours the store. Both exclude imports and loading the model.
"""
