"""Clusters of components that are active at the same tokens, and how stable they are.

The distance of two components is 1 - n_ij / (n_i + n_j - n_ij), with the numbers of tokens at which
one, the other and both are active (Jaccard). scipy's average linkage joins components whose
distance is below a limit. The stability of a cluster is the mean, over random halves of the chunks,
of its largest overlap with a cluster of this half, as a share of both together (Hennig 2007,
doi:10.1016/j.csda.2006.11.025, section 2).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.cluster import hierarchy
from scipy.spatial.distance import squareform

from valkyrie.errors import UsageError

_LEAST = 2  # tokens at which a component must be active

Importances = Mapping[str, np.ndarray]  # {name of a site: g [N, C]} of N tokens


class Member(NamedTuple):
  """A component, and the number of tokens at which it is active."""

  site: str
  component: int
  tokens: int


class Cluster(NamedTuple):
  """Components that are active together.

  stability: from 0 to 1; NaN if none is active in any half of the chunks.
  """

  members: Sequence[Member]
  stability: float


class Clustering(NamedTuple):
  """The clusters of several components, from the largest to the smallest.

  alone: the components that no cluster has.
  left_out: how many components are active, but less often than those that are clustered.
  """

  clusters: Sequence[Cluster]
  alone: Sequence[Member]
  left_out: int


def clustered(
  read: Callable[[], Iterable[Importances]],
  threshold: float,
  *,
  most: int = 1000,
  distance: float = 0.5,
  seeds: Sequence[int] = (0, 1, 2, 3, 4),
) -> Clustering:
  """Clusters the most frequent components of a text.

  Memory grows with the square of `most` and with the seeds, not with the text.

  Args:
    read: reads the text, chunk by chunk; it is called twice.
    threshold: the importance above which a component is active.
    most: components that are clustered, the most frequent ones.
    distance: the mean distance below which clusters are joined.
    seeds: of the random halves of the chunks.

  Raises a UsageError if a number is out of range.
  """
  if most < 2 or not 0 < distance < 1:
    raise UsageError(
      f'most={most} and distance={distance} are out of range. Cluster at least 2 components, at a '
      'distance between 0 and 1.'
    )
  counts = _counts(read, threshold)
  flat = np.concatenate([*counts.values()])
  active = int((flat >= _LEAST).sum())
  numbers = np.sort(np.argsort(-flat, kind='stable')[: min(most, active)])
  together, halves = _together(read, threshold, numbers, seeds)
  of_all = _labels(together, distance)
  of_halves = [_labels(half, distance) for half in halves]

  sites = [(name, number) for name, of_site in counts.items() for number in range(len(of_site))]
  members = []
  for number in numbers:
    name, component = sites[number]
    members.append(Member(name, component, int(flat[number])))
  clusters = []
  alone = []
  for label in np.unique(of_all):
    inside = np.flatnonzero(of_all == label)
    own = sorted((members[n] for n in inside), key=lambda member: -member.tokens)
    if len(own) == 1:
      alone += own
    else:
      overlaps = [_overlap(of_all == label, labels) for labels in of_halves]
      clusters.append(Cluster(own, _mean(overlaps)))
  clusters.sort(key=lambda cluster: -len(cluster.members))
  return Clustering(clusters, alone, active - len(numbers))


def _counts(read: Callable[[], Iterable[Importances]], threshold: float) -> dict[str, np.ndarray]:
  """{name of a site: [C]}, the number of tokens at which each component is active."""
  counts: dict[str, np.ndarray] = {}
  for importances in read():
    for name, g in importances.items():
      active = (g > threshold).sum(axis=0)
      counts[name] = counts.get(name, 0) + active
  return counts


def _together(
  read: Callable[[], Iterable[Importances]],
  threshold: float,
  numbers: np.ndarray,
  seeds: Sequence[int],
) -> tuple[np.ndarray, list[np.ndarray]]:
  """The numbers of tokens [S, S] at which two components are active: of all chunks, of halves."""
  together = np.zeros((len(numbers), len(numbers)))
  halves = [np.zeros_like(together) for _ in seeds]
  randoms = [np.random.default_rng(seed) for seed in seeds]
  for importances in read():
    all_g = np.concatenate([*importances.values()], axis=1)
    active = (all_g[:, numbers] > threshold).astype(np.float32)
    of_chunk = active.T @ active
    together += of_chunk
    for number, random in enumerate(randoms):
      if random.random() < 0.5:
        halves[number] += of_chunk
  return together, halves


def _labels(together: np.ndarray, distance: float) -> np.ndarray:
  """The number of the cluster of each component; 0 for those that are never active."""
  counts = np.diag(together)
  active = np.flatnonzero(counts)
  labels = np.zeros(len(counts), int)
  if len(active) < 2:
    labels[active] = 1
    return labels
  both = together[np.ix_(active, active)]
  either = counts[active][:, None] + counts[active] - both
  distances = 1 - both / either
  np.fill_diagonal(distances, 0)
  tree = hierarchy.linkage(squareform(distances, checks=False), 'average')
  labels[active] = hierarchy.fcluster(tree, distance, 'distance')
  return labels


def _overlap(cluster: np.ndarray, labels: np.ndarray) -> float:
  """The largest share that a cluster [S] and one of others have in common; NaN without others."""
  known = cluster & (labels > 0)
  if not known.any():
    return np.nan
  shares = []
  for label in np.unique(labels[known]):
    other = labels == label
    shares.append((cluster & other).sum() / (cluster | other).sum())
  return float(max(shares))


def _mean(values: Sequence[float]) -> float:
  """The mean of the values that are not NaN; NaN without any."""
  known = [value for value in values if not np.isnan(value)]
  return float(np.mean(known)) if known else np.nan


def as_json(clustering: Clustering) -> dict[str, Any]:
  """A clustering for a file."""
  clusters = []
  for cluster in clustering.clusters:
    members = [member._asdict() for member in cluster.members]
    stability = None if np.isnan(cluster.stability) else round(cluster.stability, 4)
    clusters.append({'stability': stability, 'members': members})
  alone = [member._asdict() for member in clustering.alone]
  return {'clusters': clusters, 'alone': alone, 'left_out': clustering.left_out}
