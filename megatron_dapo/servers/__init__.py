"""Everything that changes with SGLang. The package speaks to servers by HTTP and a process group and never imports them.

``fleet`` starts them and checks their health, ``client`` generates with them, ``publish`` gives them the weights and ``verify``
proves it; ``engine`` is all of that as the engine of a run. ``cpu_platform`` alone runs inside a server.
"""
