"""What is computed: options, inputs, the problem that they make, and how its arrays lie in memory."""
