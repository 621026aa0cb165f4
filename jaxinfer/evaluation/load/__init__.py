"""Load on an engine: who asks for how much (`lengths`), when (`arrivals`), the run (`driver`), what it took
(`measures`)."""
