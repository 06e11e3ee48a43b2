"""`python -m pigou_lab.gpu_check`: does the runtime work on this GPU, and how fast is it?"""
