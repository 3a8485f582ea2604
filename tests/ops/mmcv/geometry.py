"""Plane geometry in loops over Python floats: what the operators' answers are compared with."""
import math


def cross(o, a, b):
    return (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0])


def area(polygon):
    return sum(a[0] * b[1] - a[1] * b[0] for a, b in zip(polygon, polygon[1:] + polygon[:1])) / 2


def clip(subject, window):
    """Sutherland-Hodgman: the part of any polygon inside a convex one of positive direction."""
    for a, b in zip(window, window[1:] + window[:1]):
        found = []
        for p, q in zip(subject, subject[1:] + subject[:1]):
            sp, sq = cross(a, b, p), cross(a, b, q)
            if sp >= 0:
                found.append(p)
            if (sp >= 0) != (sq >= 0):
                t = sp / (sp - sq)
                found.append((p[0] + t * (q[0] - p[0]), p[1] + t * (q[1] - p[1])))
        subject = found
        if not subject:
            return []
    return subject


def hull(points):
    """Andrew's monotone chain, in positive direction."""
    points = sorted(set(points))
    if len(points) < 3:
        return points

    def half(side):
        chain = []
        for p in side:
            while len(chain) > 1 and cross(chain[-2], chain[-1], p) <= 0:
                chain.pop()
            chain.append(p)
        return chain[:-1]

    return half(points) + half(points[::-1])


def rotated(x, y, w, h, angle):
    """Corners of a rotated box in positive direction."""
    c, s = math.cos(angle), math.sin(angle)
    return [(x + c * a * w / 2 - s * b * h / 2, y + s * a * w / 2 + c * b * h / 2)
            for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]


def overlap(a, b, first=False):
    """Overlap of two convex polygons of positive direction."""
    both = abs(area(clip(a, b) or [(0, 0)]))
    return both / (abs(area(a)) if first else abs(area(a)) + abs(area(b)) - both)
