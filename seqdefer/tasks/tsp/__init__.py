"""The traveling salesman task: a pointer network writes a tour, a solver completes it from any point on."""
