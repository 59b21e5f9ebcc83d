"""Device models: closed forms of seconds with a few constants, fitted to timings. Numpy only."""
