"""Which places serve which stage and replica: numbers in, numbers out."""
