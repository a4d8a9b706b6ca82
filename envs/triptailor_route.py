"""Lengths on the earth as TripTailor's route measure needs them: the geodesic of WGS 84, and a mean leg.

A sphere is up to 0.5 % off. The series are those of the auxiliary sphere in powers of the flattening, kept as
far as double precision shows; checked against geographiclib to 1e-12 (tests hold known lengths).
Source: Karney 2013, Algorithms for geodesics, J. Geodesy 87, eqs. 8 to 25; iteration after Vincenty 1975.
"""

import math
from functools import lru_cache
from itertools import pairwise

Point = tuple[float, float]  # latitude, longitude in degrees

A_KM = 6378.137  # equatorial radius of WGS 84
F = 1 / 298.257223563  # flattening
N = F / (2 - F)  # third flattening


@lru_cache(maxsize=1 << 14)  # the same legs come again in every mode and in other plans of a city
def geodesic_km(a: Point, b: Point) -> float:
    """Length in km of the shortest way between two points on WGS 84.

    raises  ValueError for a latitude outside [-90, 90], a number that is not finite, and the few pairs on
            opposite sides of the earth where the iteration does not settle
    """
    for lat, lon in (a, b):
        if not (-90 <= lat <= 90 and math.isfinite(lon)):
            raise ValueError(f"latitude {lat}, longitude {lon}: wanted -90 to 90 and a finite number")
    lat1, lat2 = math.radians(a[0]), math.radians(b[0])
    root1, root2 = (math.hypot(math.cos(lat), (1 - F) * math.sin(lat)) for lat in (lat1, lat2))
    sin1, cos1 = (1 - F) * math.sin(lat1) / root1, math.cos(lat1) / root1  # of the reduced latitudes
    sin2, cos2 = (1 - F) * math.sin(lat2) / root2, math.cos(lat2) / root2
    # sine of their difference from that of the latitudes, which loses no digits over short ways
    rise = (1 - F) * math.sin(math.radians(b[0] - a[0])) / (root1 * root2)
    step = math.radians(math.remainder(b[1] - a[1], 360.0))
    omega = step
    for _ in range(200):
        east = cos2 * math.sin(omega)
        north = rise + 2 * sin1 * cos2 * math.sin(omega / 2) ** 2
        sin_arc, cos_arc = math.hypot(east, north), sin1 * sin2 + cos1 * cos2 * math.cos(omega)
        if sin_arc == 0 and cos_arc > 0:
            return 0.0
        arc = math.atan2(sin_arc, cos_arc)
        sin0 = cos1 * east / sin_arc if sin_arc else 0.0  # sine of the azimuth at the equator
        k2 = F * (2 - F) / (1 - F) ** 2 * (1 - sin0**2)
        eps = k2 / (1 + math.sqrt(1 + k2)) ** 2
        middle = 2 * math.atan2(sin1, cos1 * north / sin_arc if sin_arc else cos1) + arc
        last, omega = omega, step + F * sin0 * _longitude(eps, arc, middle)
        if abs(omega - last) < 1e-15:
            return A_KM * (1 - F) * _distance(eps, arc, middle)
    raise ValueError(f"no geodesic found between {a} and {b}: they lie on opposite sides of the earth")


def _sines(coefficients: list[float], arc: float, middle: float) -> float:
    """arc + sum of c_l (sin 2 l s2 - sin 2 l s1), where s2 - s1 = arc and s2 + s1 = middle."""
    waves = (2 * c * math.sin(i * arc) * math.cos(i * middle) for i, c in enumerate(coefficients, start=1))
    return arc + sum(waves)


def _distance(eps: float, arc: float, middle: float) -> float:
    """I1 between the ends (eq. 15), in units of the polar radius."""
    scale = (1 + eps**2 / 4 + eps**4 / 64) / (1 - eps)
    waves = [
        -eps / 2 + 3 * eps**3 / 16,
        -(eps**2) / 16 + eps**4 / 32,
        -(eps**3) / 48,
        -5 * eps**4 / 512,
    ]
    return scale * _sines(waves, arc, middle)


def _longitude(eps: float, arc: float, middle: float) -> float:
    """I3 between the ends (eq. 23)."""
    scale = 1 - (1 - N) / 2 * eps - (1 / 4 + N / 8 - 3 * N**2 / 8) * eps**2 - (1 + 3 * N) / 16 * eps**3
    waves = [
        (1 - N) / 4 * eps + (1 - N**2) / 8 * eps**2 + 3 * (1 + N) / 64 * eps**3,
        (1 / 16 - 3 * N / 32) * eps**2 + (3 / 64 - N / 32) * eps**3,
        (5 / 192 - 3 * N / 64) * eps**3,
    ]
    return scale * _sines(waves, arc, middle)


def mean_leg_km(days: list[list[Point]], *, home: Point | None = None) -> float:
    """Mean leg in km over all days; a day's legs join its points in their order and, with `home`, begin and
    end there (a day without points is then one leg of 0 km). 0.0 without legs."""
    legs = []
    for points in days:
        stops = points if home is None else [home, *points, home]
        legs += [geodesic_km(a, b) for a, b in pairwise(stops)]
    return sum(legs) / len(legs) if legs else 0.0
