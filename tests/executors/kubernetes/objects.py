"""The objects of a cluster and their history: versions, conflicts, graceful deletion, owners. No HTTP here.

Every change has a new resource version and an event; a history that was compacted answers 410, as etcd's does.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

Json = dict[str, Any]
Key = tuple[str, str, str]  # kind, namespace, name

_DNS = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_TERMINAL = ("Succeeded", "Failed")
SINGULAR = {"pods": "Pod", "secrets": "Secret"}


class Failure(Exception):
    """A Status that is no success."""

    def __init__(self, code: int, reason: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code, self.headers = code, more.pop("headers", {})
        self.body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": more.pop("metadata", {}),
            "status": "Failure",
        }
        self.body |= {"message": message, "reason": reason, "code": code, **more}


@dataclass(frozen=True, slots=True)
class Change:
    version: int
    kind: str
    type: str  # ADDED, MODIFIED, DELETED
    now: Json
    before: Json | None


def stamp(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Objects:
    """`changes_since` and `changed` are what watches are made of. `on_change` is told of every change at once."""

    def __init__(self) -> None:
        self.on_change: Callable[[Change], None] = lambda change: None
        self.namespaces = {"default"}
        self.service_accounts = {"default"}
        self.most_pods: int | None = None
        self.removes_ended_at_once = True
        self.version = 1000
        self.oldest = 1000  # versions below it are compacted away
        self.history: list[Change] = []
        self._there: dict[Key, Json] = {}
        self._waiting: set[asyncio.Event] = set()

    # -- reading

    def get(self, kind: str, namespace: str, name: str) -> Json:
        found = self._there.get((kind, namespace, name))
        if found is None:
            raise Failure(404, "NotFound", f'{kind} "{name}" not found', details={"name": name, "kind": kind})
        return copy.deepcopy(found)

    def find(self, kind: str, namespace: str, name: str) -> Json | None:
        found = self._there.get((kind, namespace, name))
        return copy.deepcopy(found) if found else None

    def all_of(self, kind: str, namespace: str) -> list[Json]:
        """In the order of their names, as etcd keeps them."""
        keys = sorted(key for key in self._there if key[:2] == (kind, namespace))
        return [copy.deepcopy(self._there[key]) for key in keys]

    def changes_since(self, version: int, kind: str) -> Iterator[Change]:
        if version < self.oldest - 1:
            raise Failure(410, "Expired", f"too old resource version: {version} ({self.oldest})")
        yield from (change for change in self.history if change.version > version and change.kind == kind)

    def compact(self) -> None:
        """Forget the past: watches and lists that began before must begin anew."""
        self.history.clear()
        self.version += 1
        self.oldest = self.version + 1

    async def changed(self, version: int) -> None:
        """Returns when something newer than that has happened."""
        while self.version <= version:
            event = asyncio.Event()
            self._waiting.add(event)
            try:
                await event.wait()
            finally:
                self._waiting.discard(event)

    # -- writing

    def create(self, kind: str, namespace: str, body: Json) -> Json:
        if namespace not in self.namespaces:
            raise Failure(404, "NotFound", f'namespaces "{namespace}" not found')
        new = copy.deepcopy(body)
        meta = new.setdefault("metadata", {})
        self._check(kind, new)
        key = (kind, namespace, meta["name"])
        if key in self._there:
            raise Failure(
                409, "AlreadyExists", f'{kind} "{meta["name"]}" already exists', details={"name": meta["name"]}
            )
        if kind == "pods":
            self._admit(namespace, new)
            new["status"] = {"phase": "Pending", "qosClass": "Burstable"}
        for name, text in (new.pop("stringData", None) or {}).items():
            new.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        meta |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        new |= {"apiVersion": "v1", "kind": SINGULAR[kind]}
        return self._write(key, new, "ADDED")

    def replace(self, kind: str, namespace: str, name: str, body: Json, *, part: str | None = None) -> Json:
        """PUT. `part` is a subresource: it changes that part alone, and the object itself all but that part."""
        now = self.get(kind, namespace, name)
        seen = (body.get("metadata") or {}).get("resourceVersion")
        if seen is not None and seen != now["metadata"]["resourceVersion"]:
            raise Failure(
                409,
                "Conflict",
                f'Operation cannot be fulfilled on {kind} "{name}": the object has been modified; please apply your changes'
                " to the latest version and try again",
            )
        if part is not None:
            now[part] = body.get(part)
            return self._write((kind, namespace, name), now, "MODIFIED")
        new = copy.deepcopy(body)
        kept = ("uid", "creationTimestamp", "namespace", "name", "deletionTimestamp", "deletionGracePeriodSeconds")
        new["metadata"] |= {field: now["metadata"][field] for field in kept if field in now["metadata"]}
        if "status" in now:
            new["status"] = now["status"]
        if now.get("immutable") and new.get("data") != now.get("data"):
            raise Failure(
                422,
                "Invalid",
                f'Secret "{name}" is invalid: data: Forbidden: field is immutable when `immutable` is set',
            )
        self._check(kind, new)
        return self._write((kind, namespace, name), new, "MODIFIED")

    def patch(self, kind: str, namespace: str, name: str, patch: Json, *, part: str | None = None) -> Json:
        now = self.get(kind, namespace, name)
        seen = (patch.get("metadata") or {}).get("resourceVersion")
        merged = merge_patch(now, patch)
        merged["metadata"]["resourceVersion"] = seen or now["metadata"]["resourceVersion"]
        return self.replace(kind, namespace, name, merged, part=part)

    def delete(self, kind: str, namespace: str, name: str, options: Json) -> Json:
        now = self.get(kind, namespace, name)
        meta = now["metadata"]
        wanted = (options.get("preconditions") or {}).get("uid")
        if wanted is not None and wanted != meta["uid"]:
            raise Failure(
                409,
                "Conflict",
                f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {meta['uid']}",
            )
        grace = self._grace(kind, now, options.get("gracePeriodSeconds"))
        if grace == 0:
            return self._remove((kind, namespace, name), now)
        before = meta.get("deletionGracePeriodSeconds")
        if before is not None and before <= grace:
            return now  # it can be shortened, never prolonged
        due = datetime.now(UTC) + timedelta(seconds=grace)
        meta |= {"deletionTimestamp": stamp(due), "deletionGracePeriodSeconds": grace}
        return self._write((kind, namespace, name), now, "MODIFIED")

    def collect_garbage(self) -> list[str]:
        """Delete what belongs to something that is gone. Returns their names."""
        alive = {each["metadata"]["uid"] for each in self._there.values()}
        gone = []
        for (kind, namespace, name), each in list(self._there.items()):
            owners = each["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in alive for owner in owners):
                self.delete(kind, namespace, name, {})
                gone.append(name)
        return gone

    def _grace(self, kind: str, now: Json, asked: int | None) -> int:
        if kind != "pods" or not now["spec"].get("nodeName"):
            return 0
        if now["status"].get("phase") in _TERMINAL:
            return 0 if self.removes_ended_at_once or asked == 0 else 1
        usual = now["spec"].get("terminationGracePeriodSeconds", 30)
        return usual if asked is None else max(0, asked)

    def _write(self, key: Key, new: Json, how: str) -> Json:
        before = self._there.get(key)
        self.version += 1
        new["metadata"]["resourceVersion"] = str(self.version)
        self._there[key] = new
        self._note(Change(self.version, key[0], how, copy.deepcopy(new), before))
        return copy.deepcopy(new)

    def _remove(self, key: Key, now: Json) -> Json:
        before = self._there.pop(key)
        self.version += 1
        now["metadata"]["resourceVersion"] = str(self.version)
        self._note(Change(self.version, key[0], "DELETED", copy.deepcopy(now), before))
        return now

    def _note(self, change: Change) -> None:
        self.history.append(change)
        self.on_change(change)
        for event in self._waiting:
            event.set()

    def _admit(self, namespace: str, pod: Json) -> None:
        """What admission does: a quota, and service accounts that must exist."""
        name = pod["metadata"]["name"]
        account = pod["spec"].setdefault("serviceAccountName", "default")
        if account not in self.service_accounts:
            said = f'error looking up service account {namespace}/{account}: serviceaccount "{account}" not found'
            raise Failure(403, "Forbidden", f'pods "{name}" is forbidden: {said}')
        used = sum(each["status"].get("phase") not in _TERMINAL for each in self.all_of("pods", namespace))
        if self.most_pods is not None and used >= self.most_pods:
            counts = f"requested: pods=1, used: pods={used}, limited: pods={self.most_pods}"
            raise Failure(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: pods, {counts}')

    def _check(self, kind: str, new: Json) -> None:
        meta, wrong = new["metadata"], []
        if not _DNS.fullmatch(str(meta.get("name"))) or len(meta["name"]) > 253:
            wrong.append(
                "metadata.name: Invalid value: a lowercase RFC 1123 subdomain must consist of lower case characters"
            )
        wrong += [
            f'metadata.labels: Invalid value: "{text}": a valid label must be an empty string or consist of alphanumeric characters'
            for text in (meta.get("labels") or {}).values()
            if not isinstance(text, str) or not _LABEL.fullmatch(text)
        ]
        if kind == "pods":
            wrong += _wrong_in_pod(new.get("spec"))
        if wrong:
            said = f'{SINGULAR[kind]} "{meta.get("name")}" is invalid: {", ".join(wrong)}'
            raise Failure(422, "Invalid", said, details={"causes": [{"message": text} for text in wrong]})


def _wrong_in_pod(spec: Any) -> list[str]:
    if not isinstance(spec, dict):
        raise Failure(400, "BadRequest", 'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal spec')
    wrong = []
    if not spec.get("containers"):
        wrong.append("spec.containers: Required value")
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    for place, container in enumerate(spec.get("containers") or []):
        if not isinstance(container, dict):
            raise Failure(400, "BadRequest", "json: cannot unmarshal into Go struct field PodSpec.spec.containers")
        if not container.get("image"):
            wrong.append(f"spec.containers[{place}].image: Required value")
        wrong += [
            f'spec.containers[{place}].volumeMounts: Not found: "{mount["name"]}"'
            for mount in container.get("volumeMounts") or []
            if mount["name"] not in volumes
        ]
        paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
        wrong += [
            f"volumeMounts.mountPath: Invalid value: {path}: must be unique" for path in paths if paths.count(path) > 1
        ]
        for name, limit in ((container.get("resources") or {}).get("limits") or {}).items():
            asked = ((container.get("resources") or {}).get("requests") or {}).get(name)
            if asked is not None and amount(asked) > amount(limit):
                wrong.append(
                    f'spec.containers[{place}].resources: Invalid value: "{asked}": must be at most the {name} limit'
                )
    if spec.get("restartPolicy", "Always") not in ("Always", "OnFailure", "Never"):
        wrong.append("spec.restartPolicy: Unsupported value")
    return wrong


_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "": 1}


def amount(quantity: str) -> float:
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    if match is None or match[2] not in _UNITS:
        raise Failure(400, "BadRequest", "quantities must match the regular expression")
    return float(match[1]) * _UNITS[match[2]]


def merge_patch(below: Json, patch: Json) -> Json:
    """RFC 7386, which is also what the strategic merge does to all but lists with merge keys."""
    found = copy.deepcopy(below)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = merge_patch(found.get(key) if isinstance(found.get(key), dict) else {}, value)
        else:
            found[key] = copy.deepcopy(value)
    return found


Selector = Callable[[Json], bool]


def label_selector(text: str) -> Selector:
    """`a=b,c!=d,e in (f,g),h notin (i),j,!k`."""
    wanted: list[Selector] = []
    for part in re.findall(r"[^,(]+(?:\([^)]*\))?", text):
        wanted.append(_requirement(part.strip()))
    return lambda each: all(is_so(each["metadata"].get("labels") or {}) for is_so in wanted)


def _requirement(part: str) -> Selector:
    if listed := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", part):
        key, how, texts = listed[1], listed[2], {text.strip() for text in listed[3].split(",")}
        return lambda labels: (labels.get(key) in texts) == (how == "in")
    if pair := re.fullmatch(r"([^=!\s]+)\s*(==?|!=)\s*(\S*)", part):
        name, sign, value = pair[1], pair[2], pair[3]
        return lambda labels: (labels.get(name) == value) == (sign != "!=")
    if part.startswith("!"):
        return lambda labels: part[1:] not in labels
    if not re.fullmatch(r"[A-Za-z0-9/_.-]+", part):
        raise Failure(400, "BadRequest", f"unable to parse requirement: {part!r}")
    return lambda labels: part in labels


def field_selector(text: str) -> Selector:
    """`metadata.name=a,status.phase!=Running`, and no other fields, as for pods."""
    pairs = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(metadata\.name|metadata\.namespace|spec\.nodeName|status\.phase)(==?|!=)(.*)", part)
        if match is None:
            raise Failure(400, "BadRequest", f"field label not supported: {part}")
        pairs.append((match[1].split("."), match[2] != "!=", match[3]))

    def is_so(each: Json) -> bool:
        return all(((each.get(path[0]) or {}).get(path[1], "") == value) is equal for path, equal, value in pairs)

    return is_so
