"""A profile of PipeDream, as its profiler writes it."""

PIPEDREAM = (
    "node2 -- Conv2d(3, 8) -- forward_compute_time=2.000, backward_compute_time=4.000, "
    "activation_size=100.000, parameter_size=64.000\n"
    "node1 -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, "
    "activation_size=10.0, parameter_size=0.000\n"
    "node3 -- ReLU(inplace) -- forward_compute_time=1.000, backward_compute_time=1.5, "
    "activation_size=[60.0; 40.0], parameter_size=0.000 -- stage_id=3\n"
    "node4 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, "
    "activation_size=60.0, parameter_size=0.000\n"
    "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n"
)
