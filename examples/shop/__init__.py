"""An order service that kills its own relay and consumer, and proves that nothing was lost or done twice."""
