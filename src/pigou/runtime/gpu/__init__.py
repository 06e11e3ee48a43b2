"""What `pigou.gpu_check` measures and compares with torch."""
