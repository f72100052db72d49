{{- define "kvstrata.prefix" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvstrata.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Labels by which objects select pods; called with (dict "root" $ "part" "gateway"). */}}
{{- define "kvstrata.selector" -}}
app.kubernetes.io/name: kvstrata
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "kvstrata.labels" -}}
{{ include "kvstrata.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "kvstrata.podSecurity" -}}
runAsUser: {{ .Values.uid }}
runAsGroup: {{ .Values.uid }}
fsGroup: {{ .Values.uid }}
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvstrata.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* The rights of a gateway or a picker in Kubernetes: listing the engines' endpoints. */}}
{{- define "kvstrata.account" -}}
{{- $name := printf "%s-%s" (include "kvstrata.prefix" .root) .part -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  labels: {{- include "kvstrata.labels" . | nindent 4 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  labels: {{- include "kvstrata.labels" . | nindent 4 }}
rules:
  - apiGroups: [discovery.k8s.io]
    resources: [endpointslices]
    verbs: [list]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  labels: {{- include "kvstrata.labels" . | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}

{{/* A component's settings file; called with (dict "root" $ "part" "gateway" "file" "gateway.yaml" "settings" …). */}}
{{- define "kvstrata.settings" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "kvstrata.prefix" .root }}-{{ .part }}
  labels: {{- include "kvstrata.labels" . | nindent 4 }}
data:
  {{ .file }}: |
    {{- toYaml .settings | nindent 4 }}
{{- end }}

{{/* A component's pods, as a peer of a NetworkPolicy. */}}
{{- define "kvstrata.pods" -}}
podSelector:
  matchLabels: {{- include "kvstrata.selector" . | nindent 4 }}
{{- end }}

{{/* A component's NetworkPolicy, which refuses all connections that no rule allows. Called with "rules" (list (dict "from" … "ports" …)) too;
a rule without peers is left out, since it would mean everybody. "pods": labels of pods that are not ours. */}}
{{- define "kvstrata.policy" -}}
{{- $rules := list }}
{{- range .rules }}
{{- $ports := list }}
{{- range .ports }}{{ $ports = append $ports (dict "port" (int .) "protocol" "TCP") }}{{ end }}
{{- if .from }}{{ $rules = append $rules (ternary (dict "from" .from "ports" $ports) (dict "from" .from) (gt (len $ports) 0)) }}{{ end }}
{{- end }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "kvstrata.prefix" .root }}-{{ .part }}
  labels: {{- include "kvstrata.labels" . | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- toYaml (.pods | default (include "kvstrata.selector" . | fromYaml)) | nindent 6 }}
  policyTypes: [Ingress]
  ingress: {{- toYaml $rules | nindent 4 }}
{{- end }}

{{- define "kvstrata.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "kvstrata.prefix" .root }}-{{ .part }}
  labels: {{- include "kvstrata.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "kvstrata.selector" . | nindent 6 }}
{{- end }}
