"""Schemas of the objects in launch/gke that Kubernetes itself does not know.

Written after the definitions of JobSet (v1alpha2) and KubeRay 1.6 (v1), and
narrower: they have only the fields that are used here, and no others. The pods
inside are checked as pods by the tests.
"""

_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 1}
_TEMPLATE = {"type": "object"}  # of a pod or a job, checked by the tests


def _object(required, **optional):
  """Return the schema of an object with these fields and no others."""
  return {
    "type": "object",
    "properties": required | optional,
    "required": list(required),
    "additionalProperties": False,
  }


def _texts():
  return {"type": "object", "additionalProperties": _TEXT}


_METADATA = _object(
  {"name": _TEXT, "namespace": _TEXT}, annotations=_texts(), labels=_texts()
)

JOB_SET = _object(
  {
    "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
    "kind": {"const": "JobSet"},
    "metadata": _METADATA,
    "spec": _object(
      {
        "replicatedJobs": {
          "type": "array",
          "minItems": 1,
          "items": _object(
            {"name": _TEXT, "template": _TEMPLATE}, replicas=_COUNT
          ),
        }
      },
      failurePolicy=_object({"maxRestarts": _COUNT}),
      network=_object(
        {},
        enableDNSHostnames={"type": "boolean"},
        publishNotReadyAddresses={"type": "boolean"},
      ),
    ),
  }
)

RAY_CLUSTER = _object(
  {
    "apiVersion": {"const": "ray.io/v1"},
    "kind": {"const": "RayCluster"},
    "metadata": _METADATA,
    "spec": _object(
      {
        "rayVersion": _TEXT,
        "authOptions": _object({"mode": {"const": "token"}}),
        "headGroupSpec": _object(
          {"rayStartParams": _texts(), "template": _TEMPLATE}
        ),
        "workerGroupSpecs": {
          "type": "array",
          "minItems": 1,
          "items": _object(
            {
              "groupName": _TEXT,
              "replicas": _COUNT,
              "minReplicas": _COUNT,
              "maxReplicas": _COUNT,
              "rayStartParams": _texts(),
              "template": _TEMPLATE,
            },
            numOfHosts=_COUNT,
          ),
        },
      }
    ),
  }
)
