"""A comparison of systems of expert selection: contenders, measurements, tables and figures."""
