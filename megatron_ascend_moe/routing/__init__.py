"""From the router's dense map to compact routes, and from routes to rows."""

from megatron_ascend_moe.routing.plan import RoutePlan, plan_routes
from megatron_ascend_moe.routing.route_adapter import RoutingMapToIndices, routing_map_to_indices

__all__ = ["RoutePlan", "RoutingMapToIndices", "plan_routes", "routing_map_to_indices"]
