"""Compile ``device.cpp`` against the installed torch."""
import os
import shutil
import subprocess
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent


def compiler():
    return shutil.which(os.environ.get('CXX', 'g++')) or shutil.which('clang++')


def build(folder):
    root = Path(torch.__file__).parent
    target = folder / 'host_cuda.so'
    done = subprocess.run(
        [compiler(), '-std=c++20', '-O1', '-shared', '-fPIC', str(FOLDER / 'device.cpp'),
         f'-I{root}/include', f'-I{root}/include/torch/csrc/api/include', f'-L{root}/lib',
         '-lc10', '-ltorch_cpu', f'-Wl,-rpath,{root}/lib',
         f'-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}', '-o', str(target)],
        capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'device.cpp does not compile:\n{done.stderr[-4000:]}')
    return target


def environment(library, base):
    """``base`` with what a process needs to have the device."""
    path = os.pathsep.join(filter(None, [str(FOLDER), base.get('PYTHONPATH', '')]))
    return {**base, 'PYTHONPATH': path, 'MMREPRO_HOST_CUDA': str(library)}
