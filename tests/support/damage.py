"""Damaged files: the contents of files as Hypothesis changes them.

A format has four parts: how a content becomes a tree of values, how a tree becomes a content, how
a function is applied to a content, and values to put into the tree.
"""
import io
import json
import math
import os
import pickle
import struct
import zipfile

import numpy as np
import torch
from hypothesis import strategies as st


def calling(*call):
    """Return an object whose pickle calls a function."""
    return type('Call', (), dict(__reduce__=lambda self: call))()


CODE = calling(os.mkdir, ('ran', ))
OBJECTS = [CODE, calling(np.ndarray, ((1 << 32, ), 'u1')), torch.zeros(3), np.zeros(2), (), {1: 2}]
VALUES = [None, True, -1, 0, 7, 2**70, 10**400, 1e308, math.nan, math.inf, '', 'x', 'nan',
          '0x1p+9999', '\udc80', 'a = __import__("os").mkdir("ran")\n', 'a = ' + '(' * 300,
          [], [[]], [None, 'x'], {}, {'x': None}, {'x': {'x': 'x'}}]
TEXTS = [b'', b'\0', b'\xff\xfe', b'NaN', b'1e999', b'9' * 5000, b'null', b'[]', b'{}', b'"x"',
         b'\n', b'\n[1]\n', b'../' * 2000, pickle.dumps(CODE), pickle.dumps(CODE, 2),
         *(opening * 100_000 for opening in (b'[', b'{"a":', b'(', b'-'))]


def saved(value, zipped=True):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def loaded(text):
    return torch.load(io.BytesIO(text), weights_only=False)


def repacked(text, change, zeros=0):
    """A checkpoint with a changed pickle and right checksums; ``zeros``: in compressed records."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(text)) as given, zipfile.ZipFile(
            file, 'w', zipfile.ZIP_DEFLATED if zeros else zipfile.ZIP_STORED) as made:
        for name in given.namelist():
            content = given.read(name)
            if name.endswith('/data.pkl'):
                content = change(content)
            elif zeros and '/data/' in name:
                content = bytes(zeros)
            made.writestr(name, content)
    return file.getvalue()


def announcing(size):
    """Let the pickle of four numbers announce as many as ``size``."""
    return lambda text: text.replace(b'K\x04', b'\x8a\x06' + struct.pack('<q', size)[:6])


def other_checkpoints():
    """Files that call a function, announce 4 GiB, and unpack to half a GiB."""
    four = saved(dict(meta=dict(epoch=0, iter=1), w=torch.zeros(4)))
    return {'code.pth': saved(CODE), 'announces.pth': repacked(four, announcing(1 << 32)),
            'bomb.pth': repacked(four, announcing(1 << 27), 1 << 29)}


def lines(value):
    return b''.join(json.dumps(line).encode() + b'\n'
                    for line in (value if isinstance(value, list) else [value]))


TEXT = None, None, lambda text, change: change(text), VALUES
JSON = json.loads, lambda value: json.dumps(value).encode(), *TEXT[2:]
LINES = lambda text: [json.loads(line) for line in text.splitlines()], lines, *TEXT[2:]
SAVED = loaded, saved, repacked, VALUES + OBJECTS
OLD = loaded, lambda value: saved(value, False), TEXT[2], VALUES + OBJECTS


@st.composite
def edited(draw, value, values):
    keys = []
    if isinstance(value, dict):
        keys = [*value]
    elif isinstance(value, (list, tuple)):
        keys = [*range(len(value))]
    if not keys or not draw(st.integers(0, 5)):
        return draw(st.sampled_from(values))
    key = draw(st.sampled_from(keys))
    value = list(value) if isinstance(value, tuple) else value.copy()
    if draw(st.integers(0, 9)):
        value[key] = draw(edited(value[key], values))
    else:
        del value[key]
    return value


@st.composite
def damaged(draw, text, form, others):
    load, dump, change, values = form
    kind = draw(st.sampled_from(
        ['cut', 'flip', 'insert', 'other', 'folder', 'gone', *['edit'] * 5]))
    if kind == 'edit' and load:
        return kind, dump(draw(edited(load(text), values)))
    if kind in ('other', 'folder', 'gone'):
        return kind, draw(st.sampled_from(others)) if kind == 'other' else b''
    where, bit, more = draw(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7),
                                      st.sampled_from(TEXTS)))

    def damage(text):
        at = int(where * len(text))
        return text[:at] + {'cut': b'', 'flip': bytes([text[at] ^ 1 << bit]) + text[at + 1:]}.get(
            kind, more + text[at:])

    return kind, change(text, damage) if draw(st.booleans()) else damage(text)
