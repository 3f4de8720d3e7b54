{{- define "evertick.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- define "evertick.account" -}}
{{- .Values.serviceAccount.name | default (include "evertick.name" .) -}}
{{- end }}

{{- define "evertick.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* Who a pod is. Given: root, component. */}}
{{- define "evertick.selector" -}}
app.kubernetes.io/name: evertick
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "evertick.labels" -}}
{{ include "evertick.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "evertick.podMetadata" -}}
labels:
  {{- include "evertick.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- if or .root.Values.podAnnotations .template }}
annotations:
  {{- with .root.Values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
  {{- with .template }}
  # A runner reads its template when it starts.
  evertick.io/pod-template: {{ toYaml . | sha256sum }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What every pod has. Given: root, component, account (or none), place (nodeSelector, tolerations, affinity). */}}
{{- define "evertick.pod" -}}
{{- if .account }}
serviceAccountName: {{ .account }}
automountServiceAccountToken: true
{{- else }}
automountServiceAccountToken: false
{{- end }}
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .place.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .place.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .place.affinity }}
affinity:
  {{- toYaml .place.affinity | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "evertick.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{- define "evertick.container" -}}
image: {{ include "evertick.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end }}

{{/* Settings that the chart makes of other values: two that contradict each other would leave it to chance which one holds. */}}
{{- define "evertick.ownSettings" -}}
EVERTICK_HOME: ""
EVERTICK_HEALTH_HOST: ""
EVERTICK_HEALTH_PORT: ""
EVERTICK_API_HOST: ""
EVERTICK_API_PORT: api.service.port
EVERTICK_API_TRUSTED_PROXIES: api.proxies
EVERTICK_RUNNER_QUEUES: queues of a runner
EVERTICK_RUNNER_TASK_PATTERNS: match of a runner
EVERTICK_RUNNER_SLOTS: slots of a runner
EVERTICK_EXECUTOR: executor of a runner
EVERTICK_RESULTS_FOLDER: resultsVolume of a runner
EVERTICK_POD_TEMPLATE: podTemplate of a runner
EVERTICK_POD_IMAGE: kubernetes.image
EVERTICK_FLEETS_FILE: launcher.fleets
EVERTICK_EXECUTOR_OWNER: ""
EVERTICK_KUBE_NAMESPACE: kubernetes.namespace
EVERTICK_AGENT_API_URL: kubernetes.apiUrl
EVERTICK_STORAGE: storage.url
EVERTICK_STORAGE_ENDPOINT: storage.endpoint
EVERTICK_STORAGE_REGION: storage.region
EVERTICK_STORAGE_KEY_ID: storage.secret
EVERTICK_LOG_ARCHIVE: storage.logs
EVERTICK_LOG_ARCHIVE_AFTER_SECONDS: storage.logsAfterSeconds
{{- end }}

{{/* A number as it was written: helm reads it as a float, and would write ten million as 1e+07. */}}
{{- define "evertick.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Settings of a service. Given: root, service, healthPort (or none), own (a setting that the service has of its own, or none). */}}
{{- define "evertick.env" -}}
- name: EVERTICK_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.database.secret }}
      key: {{ get .root.Values.database.keys .service }}
- name: EVERTICK_HOME
  value: /var/lib/evertick
{{- if not (hasKey .root.Values.settings "EVERTICK_LOG") }}
- name: EVERTICK_LOG
  value: json
{{- end }}
{{- if .healthPort }}
- name: EVERTICK_HEALTH_HOST
  value: 0.0.0.0
- name: EVERTICK_HEALTH_PORT
  value: {{ .healthPort | quote }}
{{- end }}
{{- with .root.Values.secretKeys.secret }}
- name: EVERTICK_SECRET_KEYS
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.root.Values.secretKeys.key }}
{{- end }}
{{- $ours := include "evertick.ownSettings" . | fromYaml }}
{{- range $name, $value := .root.Values.settings }}
{{- if hasKey $ours $name }}
{{- fail (printf "settings.%s is what the chart sets itself%s" $name (get $ours $name | empty | ternary "" (printf ": use %s" (get $ours $name)))) }}
{{- end }}
{{- if ne $name ($.own | default "") }}
- name: {{ $name }}
  value: {{ include "evertick.text" $value | quote }}
{{- end }}
{{- end }}
{{- with .root.Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where large results and moved logs are, for those who bring or fetch them. */}}
{{- define "evertick.storage" -}}
{{- with .Values.storage }}
{{- if .url }}
- name: EVERTICK_STORAGE
  value: {{ .url | quote }}
{{- with .endpoint }}
- name: EVERTICK_STORAGE_ENDPOINT
  value: {{ . | quote }}
{{- end }}
- name: EVERTICK_STORAGE_REGION
  value: {{ .region | quote }}
- name: EVERTICK_STORAGE_KEY_ID
  valueFrom:
    secretKeyRef: {name: {{ .secret | required "storage.url needs storage.secret" }}, key: {{ .idKey }}}
- name: EVERTICK_STORAGE_SECRET_KEY
  valueFrom:
    secretKeyRef: {name: {{ .secret }}, key: {{ .secretKey }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Whether some runner or the launcher makes pods: "yes" or nothing. */}}
{{- define "evertick.makesPods" -}}
{{- $makes := "" }}
{{- if .Values.launcher.enabled }}{{ $makes = "yes" }}{{ end }}
{{- range .Values.runners }}{{ if eq (.executor | default $.Values.runnerDefaults.executor) "kubernetes" }}{{ $makes = "yes" }}{{ end }}{{ end }}
{{- $makes -}}
{{- end }}

{{/* Which pods those are, as the runner marks them. */}}
{{- define "evertick.podOwner" -}}
{{- printf "%s-%s" .Release.Namespace .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Where pods of tasks and of launched runners reach the API. */}}
{{- define "evertick.apiUrl" -}}
{{- .Values.kubernetes.apiUrl | default (printf "http://%s-api.%s.svc:%v" (include "evertick.name" .) .Release.Namespace .Values.api.service.port) -}}
{{- end }}

{{/* Without them every pod would make its own, and the API would know no agent. */}}
{{- define "evertick.agentKeys" -}}
- name: EVERTICK_AGENT_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.kubernetes.agentKeys.secret | required "executor: kubernetes needs kubernetes.agentKeys.secret" }}
      key: {{ .Values.kubernetes.agentKeys.key }}
{{- end }}

{{- define "evertick.mounts" -}}
- name: home
  mountPath: /var/lib/evertick
- name: tmp
  mountPath: /tmp
{{- if .root.Values.database.tlsSecret }}
- name: tls
  mountPath: /etc/evertick/tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "evertick.volumes" -}}
- name: home
  emptyDir:
    sizeLimit: {{ .homeSize | default "1Gi" }}
- name: tmp
  emptyDir: {}
{{- with .root.Values.database.tlsSecret }}
- name: tls
  secret:
    secretName: {{ . }}
    # libpq takes a key of root's that its group may read, and nothing wider.
    defaultMode: 0440
{{- end }}
{{- end }}

{{/* Alive while its own loop turns, ready while it can do its work. An outage of the database ends no pod. */}}
{{- define "evertick.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /healthz, port: health}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}
