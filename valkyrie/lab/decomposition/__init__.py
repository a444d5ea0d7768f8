"""Decomposition of a trained model's matrices into components whose importance is learned.

Tests cite the rules by number. A live site is a matrix W with masks in a pass. With masks m for
each token and component, a mask d of the delta for each token, and a route q, it computes

    y = where(q, ((x V) m) U + d (x W - (x V) U), x W)

What is compared:

- D1: m = g + (1 - g) r, with importance g and sources r in [0, 1]. d is a source of its own: the
  delta, which V U lacks of W, may always be ablated.
- D2: a site that is not live computes x W, without rounding and without a gradient of V and U.
- D3: the target is the output of the frozen model, not of the decomposed one with masks of 1.
- D4: importances come from the activations of the frozen model.
- D5: the delta is applied to activations. Nothing of the size of W is formed for a token.

Importance:

- D6: one logit z gives two importances. The lower one, for masks, is clip(z, 0, 1); its gradient
  is 0.01 g below 0 if descent would raise z, and 0 otherwise and above 1. The upper one, for
  minimality, is the same clip with a slope of 0.01 above 1.
- D7: draws depend on the seed, the use, the row and the token of the row, and on nothing else.

Losses:

- D8: the divergence is KL(clean || masked) of the next tokens, in float32, averaged over weighted
  tokens.
- D9: it is also averaged over the passes of a term.
- D10: faithfulness is the sum of the squared differences of W and V U over the number of elements
  of all sites.
- D11: minimality is the sum over components of f, the mean over all tokens of the step of
  (g + 1e-12)^p, or of g² / (g² + γ²).
- D12: frequency is the sum of f log2(1 + a f), with f the mean over the whole step: over chunks,
  micro-batches and devices. A pass before the step computes f, and the step's gradient uses the
  slope at that f, so it is exact.

Adversaries:

- D13: sources begin uniform, and are projected to [0, 1] after each update.
- D14: a step begins with ascents, in which everything but the sources is constant and all sites are
  routed. Then the main loss uses the sources, and its gradient by them, divided by the coefficient
  of the term, gives one more ascent.
- D15: each adversary has sources of its own.
- D16: their learning rate advances once a step.
- D17: the gradient of a shared source is the mean over all rows, chunks and devices that share it.

Training:

- D18: the model has neither a gradient nor moments.
- D19: steps on only faithfulness precede the first step, and their moments are forgotten. A resumed
  run does not repeat them.
- D20: a checkpoint has V, U, importances, sources, all moments and counters.
- D21: cuts into chunks, groups of rows and layouts change no draw.

Memory:

- D22: with the same sources, loss and gradient do not depend on the cut into chunks.
- D23: the carry of a masked pass is reset where the clean one is: at document starts and after a
  refused step.
- D24: with masks and delta of 1, outputs and carries equal the model's. With no live site they are
  equal bit for bit.
- D25: a write into memory that is read chunks later makes its component important where it writes.

S5's B is the real map [D, 2P] to pairs of state and C the map [2P, D] from them, with the implied
conjugates: a component of B reads one direction of the stream and writes one complex vector of
states. The gain of the discretization scales what B's site gives.

Differences from the published code (arXiv 2506.20790):

- `Adversary.scope` has 'all', 'rows', 'positions' and 'tokens' for c, nsc, sc and bsc.
- Draws are by row and token, not by step and batch.
- Gradient clipping at a norm has the factor c / norm, not c / (norm + 1e-6).
- Importance by blocks is causal, with a carry, not a bidirectional transformer over a context.
- Minimality counts all tokens, and reconstruction weighted ones. There, all tokens have weight 1.
"""
