"""One thread per operator, in this process and those that it starts; imported before torch.

Trainings are compared bit for bit between processes, several of which share the cores.
"""
import os

for variable in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[variable] = '1'
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
