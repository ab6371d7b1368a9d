"""Trace a deep model at the price of shallow ones: blocks that repeat are traced a few times and unrolled.

A worked example. Each block of a model keeps one tensor for backward, `h`. The tapes of 2 and 3 layers, side by side:

       2 layers            3 layers            first/last/step   or   youngest/oldest/since
    1  alloc embedding     alloc embedding
    2  alloc layers.0: h   alloc layers.0: h   0 / 2 / +0
    3  alloc layers.1: h   alloc layers.1: h   1 / 1 / +1
    4                      alloc layers.2: h   2 / 0 / +1         <- one more than in the tape of 2 layers
    5  free  layers.1: h   free  layers.2: h                          1 / 2 / 1
    6  free  layers.0: h   free  layers.1: h                          1 / 1 / 2
    7                      free  layers.0: h                          1 / 0 / 3     <- one more
    8  free  embedding     free  embedding

Storages of one *kind* differ in their layer alone: all `h` are one kind. Where an event takes place is written in
three ways. A birth names its layer: counted from the first, counted from the last, and relative to the layer that was
named before it. A death names a living storage of its kind: counted from the youngest, counted from the oldest, and
by how many of the kind have been born since, itself included.

Walk down both tapes. Two events match if they do the same to the same kind and at least one of the three ways agrees;
only the ways that agree are kept. Line 3 matches with `first` and `step`: 1 / 0 / +1 in the tape of 2 layers. At line
4 the tapes part: the deeper one must now go through one more block, so the event before (line 3) has to match line 4,
which leaves `step`, and from line 5 on the tapes must match again. Line 3 is thereby a *repeated part*: "alloc the
layer after the last one named". Likewise lines 6 and 7 match in `youngest`: line 6 is the repeated part "free the
youngest h".

The tape of 5 layers plays each repeated part once for every layer more than 1 (four times) and all else once: alloc
embedding, alloc layers.0 to layers.4, free layers.4 to layers.0, free embedding.

Two further rules. If a kind has different sizes in the two tapes (an optimizer's list with one entry a layer), the
size grows by that difference with each period. And a *period* may be several layers: in Gemma 3 every sixth layer
attends to all tokens, so its tapes differ by six layers.

What guards this: the blocks that are left out must be equal, module by module, to those that are traced (`depths`);
the tape must not depend on anything but blocks (`NotPeriodic` otherwise); and the tape unrolled to a third, shallower
depth must be the one traced there, event by event. Wherever one of these fails, the whole model is traced.
"""
