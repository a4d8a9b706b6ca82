"""Draw some of a benchmark's records without bias: files are often sorted by difficulty, so that the first
n of them are the easy ones."""

import random


def stratified(strata: list[str], n: int, *, seed: int) -> list[int]:
    """n indices into `strata`, each stratum with its share of them (a fraction is rounded at random).

    strata   stratum of each record, e.g. "10 cities"
    returns  indices in drawn order, none twice; the draw of n - 1 is the start of the draw of n
    raises   ValueError unless 1 <= n <= len(strata)
    """
    if not 0 < n <= len(strata):
        raise ValueError(f"n={n}, there are {len(strata)} records; choose 1 to {len(strata)}")
    generator = random.Random(seed)
    members: dict[str, list[int]] = {}
    for i, stratum in enumerate(strata):
        members.setdefault(stratum, []).append(i)
    places = []
    for stratum in sorted(members):
        drawn = generator.sample(members[stratum], len(members[stratum]))
        offset = generator.random()
        places += [((rank + offset) / len(drawn), i) for rank, i in enumerate(drawn)]
    return [i for _, i in sorted(places)[:n]]
